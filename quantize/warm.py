"""What a follower imports, imported once by the server that followers are forked from: a module to be named as its preload, not to be used."""

from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the server does once it serves: Ctrl-C is the leader's to hear

from gemq.memory import import_transformers_alone  # noqa: E402

import_transformers_alone()

import transformers.modeling_utils  # noqa: E402, F401

import gemq.quantize.follower  # noqa: E402, F401
