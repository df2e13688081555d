"""Make the golden checkpoint of this version: `python -m tests.golden.make`, once a release, into a new folder beside this file.

A Gemma 4 with PLE, shared keys and values, two head sizes and a small vision tower, quantized by this directory's recipe and signed with a key
that is thrown away. `test_golden.py` holds every later version to verifying it.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.models import gemma4
from tests.models.weights import fill

import gemq
from gemq.cli import app

HERE = Path(__file__).resolve().parent
_VISION = {"hidden_size": 16, "head_dim": 8, "global_head_dim": 8, "intermediate_size": 32, "num_hidden_layers": 1, "patch_size": 8,
           "position_embedding_size": 16}


def build_source(out: Path) -> Path:
    """The source: small enough that its checkpoint can be committed."""
    out.mkdir(parents=True)
    config = gemma4.small_config(
        "e4b", hidden_size=64, intermediate_size=64, hidden_size_per_layer_input=32, num_hidden_layers=3, num_kv_shared_layers=1,
        layer_types=["sliding_attention", "full_attention", "full_attention"], vocab_size=384, vocab_size_per_layer_input=384,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, global_head_dim=64,
    )  # fmt: skip
    config["audio_config"] = None
    config["vision_config"] |= _VISION
    gemma4.save_files(out, config)
    model = gemma4.empty_model(config)
    fill(model, 5, one_plus_norms=False)
    gemma4.save_model(out, model, config, 5)
    return out


def main() -> None:
    """Quantize, measure, seal, sign."""
    name = f"gemq-{gemq.__version__}"
    draw = random.Random(4)
    ids = [[draw.randrange(20, 384) for _ in range(31)] for _ in range(12)]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        source = build_source(work / "golden-source")
        (work / "calibration.jsonl").write_text("".join(json.dumps({"token_ids": [2, *row]}) + "\n" for row in ids[:8]))
        records = ({"id": f"r{number}", "context_token_ids": [2], "target_token_ids": row} for number, row in enumerate(ids[8:]))
        (work / "held-out.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        app(["quantize", str(source), "--recipe", str(HERE / "recipe.yaml"), "--calibration", str(work / "calibration.jsonl"), "--samples", "8",
             "--length", "32", "--eval-data", str(work / "held-out.jsonl"), "--device", "cpu", "--output", str(HERE / name)],
            standalone_mode=False)  # fmt: skip
        key = ec.generate_private_key(ec.SECP256R1())
        (work / "key.pem").write_bytes(key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))  # fmt: skip
        (HERE / f"{name}.pub").write_bytes(key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))  # fmt: skip
        app(["sign", str(HERE / name), "--key", str(work / "key.pem")], standalone_mode=False)
        app(["verify", str(HERE / name), "--source", str(source), "--public-key", str(HERE / f"{name}.pub")], standalone_mode=False)


if __name__ == "__main__":
    main()
