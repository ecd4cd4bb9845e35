"""The dpo rows: python -m benchmarks.dpo [--only CASE] [--pairs N]."""

from benchmarks.run import main

if __name__ == "__main__":
    main("dpo")
