"""One gradient boosting model, judged by cross-validation: area under the ROC curve and accuracy.

Leaves `result.json` in --out. Needs scikit-learn, which brings the data.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.model_selection import StratifiedKFold, cross_validate

FLOATS = (
    *("learning_rate", "subsample", "max_features", "min_weight_fraction_leaf"),
    *("min_impurity_decrease", "ccp_alpha"),
)
WHOLE = ("n_estimators", "max_depth", "min_samples_split", "min_samples_leaf", "max_leaf_nodes")
FOLDS = 3
SEED = 0


def main(argv: list[str] | None = None) -> int:
    """Judge one combination."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in FLOATS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, required=True)
    for name in WHOLE:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, required=True)
    parser.add_argument("--loss", choices=("log_loss", "exponential"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    chosen = vars(parser.parse_args(argv))
    out = chosen.pop("out")
    (out / "result.json").write_text(json.dumps(judge(chosen)), encoding="utf-8")
    return 0


def judge(chosen: dict[str, object]) -> dict[str, float]:
    """Means over the folds, which are the same for every combination."""
    features, labels = load_breast_cancer(return_X_y=True)
    found = cross_validate(
        GradientBoostingClassifier(random_state=SEED, **chosen),
        features,
        labels,
        cv=StratifiedKFold(FOLDS, shuffle=True, random_state=SEED),
        scoring={"auc": "roc_auc", "accuracy": "accuracy"},
    )
    return {name: round(float(found[f"test_{name}"].mean()), 6) for name in ("auc", "accuracy")}


if __name__ == "__main__":
    sys.exit(main())
