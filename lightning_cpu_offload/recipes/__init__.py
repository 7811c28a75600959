"""Ready-made parts for the configs: a GPT and the text it learns from. Nothing here knows of offload."""

from lightning_cpu_offload.recipes.gpt import GPT
from lightning_cpu_offload.recipes.text import TextDataModule

__all__ = ["GPT", "TextDataModule"]
