"""The grpo rows: python -m benchmarks.grpo [--only CASE] [--pairs N]."""

from benchmarks.run import main

if __name__ == "__main__":
    main("grpo")
