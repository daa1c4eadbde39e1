"""Dense weights in safetensors files, one tensor at a time."""

from __future__ import annotations

from pathlib import Path

import torch

from autoplan.errors import UsageError


class SafetensorsFolder:
    """Tensors of one safetensors file, or of every one in a folder, read when they are asked for."""

    def __init__(self, path: str | Path) -> None:
        from safetensors import safe_open

        root = Path(path)
        files = [root] if root.is_file() else sorted(root.glob("*.safetensors"))
        if not files:
            raise UsageError(f"{root} holds no safetensors file: give a .safetensors file, or a folder with some.")
        self._files = [safe_open(str(file), framework="pt") for file in files]
        self._home = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 (no mapping)

    def get(self, name: str) -> torch.Tensor | None:
        """The dense tensor called `name`; None if no file has it."""
        return self._home[name].get_tensor(name) if name in self._home else None
