"""Datasets by their Hub id, from a server on this machine that speaks the part of the Hub's API that reading takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

REVISION = "a" * 40
FILES = {
    "README.md": (
        "---\nconfigs:\n- config_name: small\n  data_files:\n  - {split: train, path: data/train.jsonl}\n"
        "  - {split: validation, path: data/validation.jsonl}\n---\n"
    ),
    "data/train.jsonl": '{"text": "a", "note": 1}\n{"text": "b", "note": 2}\n',
    "data/validation.jsonl": '{"text": "v", "note": 3}\n',
}
SCRIPT = """
import json
from hf_strategies.data.arguments import DataArguments
from hf_strategies.data.sources import load_rows

def load(**options):
    try:
        train, held_out = load_rows(DataArguments(held_out_rows=0, **options), 0)
        return [[row["text"] for row in train], held_out and held_out["text"][:], list(next(iter(train)))]
    except ValueError as error:
        return str(error)

named = {"dataset_name": "me/data", "dataset_config": "small"}
print(json.dumps([
    load(**named, dataset_test_split="validation"),
    load(**named, streaming=True, shuffle_buffer_size=1, dataset_columns=["text"]),
    load(datasets=[
        {"path": "me/data", "name": "small", "split": split, "columns": ["text"]} for split in ("train", "validation")
    ]),
    load(**named, dataset_train_split="test"),
    load(dataset_name="me/data", dataset_config="large"),
    load(dataset_name="me/none"),
]))
"""


class Hub(BaseHTTPRequestHandler):
    """One dataset, ``me/data``."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        api, files = "/api/datasets/me/data", "/datasets/me/data/resolve/"
        if path.startswith(files):
            name = path.removeprefix(files).partition("/")[2]
            if name in FILES:
                self.answer(FILES[name].encode(), {"ETag": f'"{name}"', "X-Repo-Commit": REVISION})
            else:
                self.answer(b"", {"X-Error-Code": "EntryNotFound"}, 404)
        elif path == f"{api}/revision/{REVISION}":
            siblings = [{"rfilename": name} for name in FILES]
            self.answer(json.dumps({"id": "me/data", "sha": REVISION, "tags": [], "siblings": siblings}).encode())
        elif path == f"{api}/tree/{REVISION}/data":
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": "b" * 40}
                for name, content in FILES.items()
                if name.startswith("data/")
            ]
            self.answer(json.dumps(listed).encode())
        else:
            self.answer(b"", {"X-Error-Code": "RepoNotFound"}, 404)

    do_HEAD = do_GET

    def answer(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_hub_datasets(endpoint: str, tmp_path: Path) -> None:
    """In a process of its own: the address of the Hub is read once, when its library is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole, streamed, mixture, split, config, unknown = json.loads(done.stdout.splitlines()[-1])
    assert whole == [["a", "b"], ["v"], ["text", "note"]]
    assert streamed == [["a", "b"], None, ["text"]]
    assert mixture == [["a", "b", "v"], None, ["text"]]
    assert split == "dataset_train_split='test': allowed are train, validation"
    assert "dataset_name='me/data' cannot be read: ValueError: BuilderConfig 'large' not found. Avail" in config
    assert "dataset_name='me/none' cannot be read: DatasetNotFoundError" in unknown
