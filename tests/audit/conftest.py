import sys
from pathlib import Path

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def quiet():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
