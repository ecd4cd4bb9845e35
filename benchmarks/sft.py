"""The sft rows: python -m benchmarks.sft [--only CASE] [--pairs N]."""

from benchmarks.run import main

if __name__ == "__main__":
    main("sft")
