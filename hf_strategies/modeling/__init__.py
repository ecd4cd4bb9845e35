"""Models: scoring, sampling, references, critic, mixtures of experts."""
