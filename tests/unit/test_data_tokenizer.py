"""Bytes to ids and back, and every way a tokenizer can be missing."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_wsd.data.tokenizer import ByteTokenizer, HFTokenizer, load_tokenizer, tokenizer_identity
from megatron_wsd.errors import DataError


@given(st.binary(max_size=300))
def test_bytes_come_back(data: bytes) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(data)
    assert ids.tolist() == list(data)
    assert tokenizer.decode(np.append(ids.astype(np.int64), tokenizer.eod)) == data


def test_the_byte_tokenizer_keeps_an_id_of_its_own_for_the_end() -> None:
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert json.loads(json.dumps(tokenizer.describe())) == {"type": "byte", "vocab_size": 257, "eod": 256}


@pytest.mark.parametrize("spec", ["", "bytes", "hf:", "gpt2"])
def test_unknown_specs_are_refused(spec: str) -> None:
    with pytest.raises(DataError, match=r"data\.tokenizer: expected 'byte' or 'hf:PATH'"):
        load_tokenizer(spec)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("touched the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("no_network")
def test_a_folder_that_is_not_there_is_refused_without_a_look_at_the_network(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a folder"):
        load_tokenizer("hf:gpt2")
    with pytest.raises(DataError, match="no such file in it"):
        load_tokenizer(f"hf:{tmp_path}")


def test_without_transformers_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)  # import then raises ImportError
    with pytest.raises(DataError, match="pip install transformers"):
        HFTokenizer(tmp_path)


def test_the_identity_follows_the_tokenizer_and_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    first = tokenizer_identity(f"hf:{tmp_path}")
    (tmp_path / "model.safetensors").write_text("weights")
    assert tokenizer_identity(f"hf:{tmp_path}") == first
    (tmp_path / "tokenizer.json").write_text('{"another": 1}')
    assert tokenizer_identity(f"hf:{tmp_path}") != first


@pytest.mark.usefixtures("no_network")
def test_a_hugging_face_tokenizer_on_disk_encodes_and_decodes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet
    )
    raw.train_from_iterator(["to be or not to be"] * 20, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>").save_pretrained(tmp_path)

    tokenizer = load_tokenizer(f"hf:{tmp_path}")
    data = "to be, naïvely".encode()
    ids = tokenizer.encode(data)
    assert 0 < len(ids) < len(data)  # merges were learnt
    assert ids.max() < tokenizer.vocab_size and tokenizer.eod not in ids
    assert tokenizer.decode(np.append(ids, tokenizer.eod)) == data
    assert tokenizer.describe()["eod"] == tokenizer.eod

    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(DataError, match="eos_token"):
        load_tokenizer(f"hf:{tmp_path}")
