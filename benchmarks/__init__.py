"""Side-by-side measurements against TRL on the same machine, weights, prompts and precision."""
