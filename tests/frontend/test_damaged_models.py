import numpy as np
import pytest

from benchmarks.models import build
from korch.errors import InvalidGraphError, KorchError
from korch.fission import fission
from korch.frontend import load_model
from korch.primitive.check import check_graph


@pytest.mark.parametrize("name", ["mlp", "tiny_transformer", "tiny_candy"])
@pytest.mark.parametrize("seed", range(5))
def test_a_model_with_flipped_bytes_is_read_or_refused_with_a_clear_error(name, seed):
    content = build(name).SerializeToString()
    rng = np.random.default_rng(seed)
    for _ in range(40):
        damaged = bytearray(content)
        texts = [i for i in rng.integers(0, len(damaged), 400) if damaged[i] < 127]
        for position in texts[: int(rng.integers(1, 8))]:
            damaged[position] = (damaged[position] + int(rng.integers(1, 256))) % 256
        try:
            graph = fission(load_model(bytes(damaged)))
        except InvalidGraphError:
            raise  # would say that Korch is at fault
        except KorchError as error:
            assert "\n" not in str(error)
        else:
            check_graph(graph)
