"""Train a small network on pictures of handwritten digits: `python train.py DATA OUT`.

DATA has one folder per class, full of PNG files. OUT gets a checkpoint every few epochs, an empty `logs/` for those who
come later, and `latest`, a link to the newest checkpoint. Nothing here knows where the two directories really are.
"""

import sys
from pathlib import Path

import joblib
import numpy as np
from PIL import Image
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

EPOCHS = 30
CHECKPOINT_EVERY = 10
BATCH = 50


def load(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Every picture as a row of brightness in 0..1, and its class."""
    pictures, classes = [], []
    for class_folder in sorted(folder.iterdir()):
        for picture in sorted(class_folder.glob("*.png")):
            with Image.open(picture) as image:
                pictures.append(np.asarray(image, dtype=np.float32).ravel() / 255)
            classes.append(int(class_folder.name))
    return np.array(pictures), np.array(classes)


def save(model: MLPClassifier, folder: Path, epoch: int) -> None:
    """Write a checkpoint under a temporary name, rename it, and point `latest` at it."""
    checkpoint = folder / f"epoch-{epoch:02}.joblib"
    half_written = checkpoint.with_suffix(".tmp")
    joblib.dump(model, half_written)
    half_written.rename(checkpoint)
    link = folder / "latest.new"
    link.unlink(missing_ok=True)
    link.symlink_to(checkpoint.name)
    link.rename(folder / "latest")


def main(data_folder: Path, out_folder: Path) -> None:
    """Load, train, save and judge."""
    pictures, classes = load(data_folder)
    train_x, test_x, train_y, test_y = train_test_split(
        pictures, classes, test_size=0.25, random_state=0, stratify=classes
    )
    print(f"{len(pictures)} pictures, {len(train_x)} to train on, {len(test_x)} held out", flush=True)

    (out_folder / "logs").mkdir(exist_ok=True)
    model = MLPClassifier(hidden_layer_sizes=(64,), learning_rate_init=0.005, random_state=0)
    shuffle = np.random.default_rng(0)
    for epoch in range(1, EPOCHS + 1):
        for batch in np.array_split(shuffle.permutation(len(train_x)), len(train_x) // BATCH):
            model.partial_fit(train_x[batch], train_y[batch], classes=np.arange(10))
        if epoch % CHECKPOINT_EVERY == 0:
            save(model, out_folder, epoch)
            print(f"epoch {epoch}: checkpoint written", flush=True)
    print(f"accuracy on held-out pictures: {model.score(test_x, test_y):.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
