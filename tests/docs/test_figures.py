"""scripts/experiments/figures.py: few curves, told apart without colour, and legends that are not cut."""

from pathlib import Path

import figures
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", figures.FIGURE)
def test_figure(name, tmp_path, monkeypatch):
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: drawn.append(figure))
    drawn = []
    figures.FIGURE[name](figures.RESULTS, tmp_path / "figure.png")
    (figure,) = drawn
    (axes,) = figure.axes
    looks = [(line.get_color(), line.get_marker()) for line in axes.lines]
    looks += [(bars[0].get_facecolor(), bars[0].get_hatch()) for bars in axes.containers]
    assert 3 <= len(looks) <= 6
    # Every part of a look alone tells them apart, so colour is not needed.
    assert all(len(set(parts)) == len(looks) for parts in zip(*looks, strict=True))
    (legend,) = figure.legends
    box, whole = legend.get_window_extent(), figure.bbox
    assert len(legend.get_texts()) == len(looks)
    assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1
    assert (ROOT / "docs" / "figures" / f"{name}.png").exists()
    monkeypatch.undo()
    pyplot.close("all")


def test_one_look_a_method():
    for labels in (figures.ACCURACY, figures.SCALING, figures.STEPS, figures.RACERS.values(), figures.TEXT):
        assert len({figures.place(label) for label in labels}) == len(labels)
