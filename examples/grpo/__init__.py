"""GRPO with the policy in FSDP2 workers and samples from vLLM, which is refitted after every step."""
