"""The rollout rows: python -m benchmarks.rollout [--only CASE] [--pairs N]."""

from benchmarks.run import main

if __name__ == "__main__":
    main("rollout")
