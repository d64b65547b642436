"""In place of transformers' own types: the package names all its models, and reading them takes longer than everything else."""

from typing import Any

def __getattr__(name: str) -> Any: ...
