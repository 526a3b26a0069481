"""A page with hostile words, of any size."""

from __future__ import annotations

import numpy as np

from geoflow_fast.explore.page import Certified, Explored, Items, Marked

SCRIPT = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
LONG = "long " * 2000
ARABIC = "كلب يركض على الشاطئ"
END = "</script><b id='broken'>bold</b>\u2028"
WORDS = ["a", "dog", "runs", "across", "wet", "sand", "while", "children", "fly", "kites", "near", "an", "old", "pier"]


def sample_page(
    n: int = 300, k: int = 6, items: int = 120, thumbnails: tuple[str, ...] = (), seed: int = 0
) -> Explored:
    """`n` queries with probabilities that are right, some of them hostile."""
    rng = np.random.default_rng(seed)
    p = rng.beta(2, 2, n)
    captions = [" ".join(rng.choice(WORDS, rng.integers(3, 14))) for _ in range(n)]
    for row, words in enumerate((SCRIPT, LONG, ARABIC, END)):
        if row < n:
            captions[row] = words
    return Explored(
        "What the search <found>",
        "Captions search images.",
        [f"query-{row}" for row in range(n)],
        captions,
        p,
        rng.integers(-1, items, (n, k)),
        -np.sort(-rng.dirichlet(np.ones(k) / 2, n), axis=1),
        Items([f"<i>photo</i> {item}" for item in range(items)], thumbnails=thumbnails),
        right=rng.random(n) < p,
        evidence={name: rng.normal(size=(n, 5)) for name in ("cosine", "hub", "head")},
        facts={"entropy": np.where(np.arange(n) % 7 == 0, np.nan, rng.random(n))},
        marked=[Marked("strangers", "unlike <all> others", list(range(0, n, 50))), Marked("near-duplicates", "", [])],
        certified=Certified(0.7, 0.2, 0.95, 0.3),
        verdict=("The guarantee holds.", True),
        ladder=[{"name": "cosine", "gain": "+1.2 nats", "kept": "kept"}],
    )
