"""Language models: Hugging Face causal models as tasks, instruction data, adapters in PEFT's format.

Needs the extra `llm` (transformers and peft). Methods are the same as for every other model: a method that trains
factors puts them beside the layers that `targets` names.
"""

from fedspan.language.adapters import save_adapter, save_merged
from fedspan.language.instructions import Encoded, encode, instruction_data, read_records
from fedspan.language.llama2c import read_model, read_pieces
from fedspan.language.model import CausalLM, language_model, load_base
from fedspan.language.tokens import byte_tokenizer, load_tokenizer, piece_tokenizer

__all__ = [
    "CausalLM",
    "Encoded",
    "byte_tokenizer",
    "encode",
    "instruction_data",
    "language_model",
    "load_base",
    "load_tokenizer",
    "piece_tokenizer",
    "read_model",
    "read_pieces",
    "read_records",
    "save_adapter",
    "save_merged",
]
