"""vLLM's own command line on this library's transport: ``python -m engine_client.integrations.vllm serve MODEL``."""

from __future__ import annotations

from engine_client.integrations.vllm.install import run_command_line

if __name__ == "__main__":
    run_command_line()
