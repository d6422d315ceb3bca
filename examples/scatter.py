"""Scatter and gather: one page on the members, K and V in buffers of their own in memory."""

import mmap
import tempfile

import numpy as np
import numpy.typing as npt

import kvio

LAYERS = 4
PART = 64 << 10  # bytes of K, and of V, of one layer
PAGE = LAYERS * 2 * PART
PAGES = 16


def cache() -> npt.NDArray[np.uint8]:
    """Memory of one kind (K or V): a row for each layer, with room for every page."""
    memory = np.frombuffer(mmap.mmap(-1, LAYERS * PAGES * PART), np.uint8)
    return memory.reshape(LAYERS, PAGES, PART)


def parts(k: npt.NDArray[np.uint8], v: npt.NDArray[np.uint8], page: int) -> list[object]:
    """The buffers of one page in the order in which they lie on the members: K0 V0 K1 V1 ..."""
    return [part for layer in range(LAYERS) for part in (k[layer, page], v[layer, page])]


with tempfile.TemporaryDirectory() as folder:
    members = kvio.Volume.create([f"{folder}/member-{i}" for i in range(2)], size_bytes=4 << 20)
    with kvio.Volume.open(members, mode="rw", direct="prefer") as vol:
        k, v = cache(), cache()
        for page in range(PAGES):
            k[:, page], v[:, page] = 2 * page, 2 * page + 1

        offsets = np.arange(PAGES) * PAGE
        done = vol.write_batch(offsets, [parts(k, v, page) for page in range(PAGES)])
        assert (done == PAGE).all(), done

        k_back, v_back = cache(), cache()
        done = vol.read_batch(offsets, [parts(k_back, v_back, page) for page in range(PAGES)])
        assert (done == PAGE).all(), done
        assert np.array_equal(k, k_back)
        assert np.array_equal(v, v_back)

        # On the members a page is one range, whatever its buffers in memory were.
        whole = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
        assert vol.pread(whole, 5 * PAGE) == PAGE
        expected = np.repeat(np.tile(np.array([10, 11], np.uint8), LAYERS), PART)
        assert np.array_equal(whole, expected)

        print(f"{PAGES} pages of {PAGE >> 10} KiB, each from and to {2 * LAYERS} buffers")
        print(f"bounce buffers used: {vol.stats().bounced}")
