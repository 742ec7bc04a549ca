"""Lists derived from declarations."""

from salcli.methods.base import built_in
from salcli.report.listings import methods_grid, needs


def test_what_a_method_needs_is_what_it_declares() -> None:
    """Committee, SAL (post-hoc) and Spectral are scores of the classifier's outputs, but not of these alone."""
    found = {name: needs(method) for name, method in built_in().items()}
    for name, method in built_in().items():
        for data in ("wild", "calibration"):
            declared = bool(getattr(method, f"needs_{data}", False))  # τ's is a property: params decide
            assert ("training" in found[name]) or (data in found[name]) == declared, name
    assert "wild" in found["spectral"]
    assert "wild" in found["sal-posthoc"]
    assert "calibration" in found["committee"]
    assert (found["oe"], found["csi"]) == ("training with wild data", "training on ID data")
    listed = [row[1].text for section in methods_grid(built_in()).sections for row in section]
    assert sorted(listed) == sorted(found)
