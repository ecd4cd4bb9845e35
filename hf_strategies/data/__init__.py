"""Datasets: formats, chat templates, packing, verifiable tasks."""
