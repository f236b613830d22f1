"""Models: GGUF reading, tokenizer, the transformer graphs, generation (llama.cpp)."""

from workbench.models.generate import Generation, GenerationStats, Piece, generate
from workbench.models.gguf import GGUFFile, open_gguf, shipped_models
from workbench.models.hparams import HParams
from workbench.models.kv_cache import KVCache
from workbench.models.model import Model, load
from workbench.models.offload import PlacedModel, place_weights
from workbench.models.sampling import Sampler
from workbench.models.session import Session
from workbench.models.tokenizer import Tokenizer
from workbench.models.transformer import Builder, Hidden, Segment, StepGraph, build_step

__all__ = ["Builder", "GGUFFile", "Generation", "GenerationStats", "HParams", "Hidden", "KVCache", "Model", "Piece", "PlacedModel",
           "Sampler", "Segment", "Session", "StepGraph", "Tokenizer", "build_step", "generate", "load", "open_gguf",
           "place_weights", "shipped_models"]  # fmt: skip
