"""Model families: sizes, Megatron settings and the name table of each, torch-free."""
