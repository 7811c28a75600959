"""Imported by the server that forks the runs of `test_crashes.py`: all imports and compiling are done once, here."""

import tempfile
import warnings

from tests.crashing import train

with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
    warnings.simplefilter("ignore")
    train(folder, resume=False, slow=False, epochs=1)
