"""PyTorch modules: exported, run like modules, and compared with themselves in eager mode."""
