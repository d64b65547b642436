"""The checks, by what they look at. Ids are stable; `docs/conformance.md` lists them."""
