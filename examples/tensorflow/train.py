"""Handwritten digits by TensorFlow, on one machine or many: TF_CONFIG says which. Data in /data, results in /out.

With parameter servers the steps are asynchronous (ParameterServerStrategy), without they are taken together
(MultiWorkerMirroredStrategy). Whoever starts again goes on from the last checkpoint.
"""

import os
import sys
import tempfile
import time

import numpy as np
import tensorflow as tf

STEPS = int(os.environ.get("STEPS", "300"))
SAVE_EVERY = 50
BATCH = int(os.environ.get("BATCH", "64"))
HIDDEN = int(os.environ.get("HIDDEN", "32"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))
DATA, OUT = os.environ.get("DATA", "/data"), os.environ.get("OUT", "/out")
CHECKPOINTS = f"{OUT}/checkpoints"
START_AGAIN = 200
"""An exit code of 128 or above, after which a replica is started again; 1 to 127 would fail the job."""

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
spec = resolver.cluster_spec().as_dict()
role, index = resolver.task_type, resolver.task_id or 0


class Model(tf.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        random = np.random.default_rng(1)
        self.hidden = tf.Variable(random.normal(0, 0.1, (64, HIDDEN)).astype(np.float32))
        self.out = tf.Variable(random.normal(0, 0.1, (HIDDEN, 10)).astype(np.float32))

    def loss(self, pictures, labels):
        logits = tf.nn.relu(pictures @ self.hidden) @ self.out
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    def accuracy(self, pictures, labels):
        found = tf.argmax(tf.nn.relu(pictures @ self.hidden) @ self.out, axis=1, output_type=tf.int32)
        return float(tf.reduce_mean(tf.cast(found == labels, tf.float32)))


def load():
    """Pictures and labels: 1500 to learn from, the rest to try."""
    found = np.load(f"{DATA}/digits.npz")
    pictures, labels = found["pictures"].astype(np.float32) / 16, found["labels"].astype(np.int32)
    return (pictures[:1500], labels[:1500]), (pictures[1500:], labels[1500:])


def dataset():
    learn, _ = load()
    return tf.data.Dataset.from_tensor_slices(learn).shuffle(1500, seed=index).repeat().batch(BATCH)


def report(step, loss):
    print(f"step {step} loss {loss:.3f}", flush=True)


def train(strategy, coordinator=None):
    """The loop of the chief (asynchronous), or of everybody (synchronous)."""
    with strategy.scope():
        model = Model()
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.3)
        step = tf.Variable(0, dtype=tf.int64, trainable=False)
    chief = role in (None, "chief") or (role == "worker" and index == 0 and "chief" not in spec)
    # Everybody takes part in saving; only the chief's files count.
    folder = CHECKPOINTS if chief else tempfile.mkdtemp()
    saving = tf.train.CheckpointManager(tf.train.Checkpoint(model=model, step=step), folder, max_to_keep=3)
    if latest := tf.train.latest_checkpoint(CHECKPOINTS):
        tf.train.Checkpoint(model=model, step=step).restore(latest).expect_partial()
    print(f"begins at step {int(step.numpy())}", flush=True)

    @tf.function
    def one_step(iterator):
        def on_each(batch):
            pictures, labels = batch
            with tf.GradientTape() as tape:
                loss = model.loss(pictures, labels)
            variables = [model.hidden, model.out]
            optimizer.apply_gradients(list(zip(tape.gradient(loss, variables), variables, strict=True)))
            return loss

        losses = strategy.run(on_each, args=(next(iterator),))
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)

    if coordinator:
        batches = iter(
            coordinator.create_per_worker_dataset(
                lambda: strategy.experimental_distribute_datasets_from_function(lambda _: dataset())
            )
        )
    else:
        batches = iter(strategy.experimental_distribute_dataset(dataset()))
    writer = tf.summary.create_file_writer(f"{OUT}/tensorboard") if chief else tf.summary.create_noop_writer()
    began, first = time.monotonic(), int(step.numpy())
    while (at := int(step.numpy())) < STEPS:
        if coordinator:
            losses = [coordinator.schedule(one_step, args=(batches,)) for _ in range(SAVE_EVERY)]
            coordinator.join()
            loss = float(np.mean([each.fetch() for each in losses]))
        else:
            loss = float(np.mean([float(one_step(batches)) for _ in range(SAVE_EVERY)]))
        step.assign(at + SAVE_EVERY)
        saving.save(checkpoint_number=at + SAVE_EVERY)
        with writer.as_default():
            tf.summary.scalar("loss", loss, step=at + SAVE_EVERY)
        writer.flush()
        report(at + SAVE_EVERY, loss)
        time.sleep(PAUSE_S)
    seconds = time.monotonic() - began
    if chief:
        _, (pictures, labels) = load()
        print(f"accuracy {model.accuracy(pictures, labels):.3f}", flush=True)
        print(
            f"{(STEPS - first) * BATCH / seconds:.0f} pictures a second",
            flush=True,
        )


def evaluate():
    """Try each checkpoint, until that of the last step."""
    _, (pictures, labels) = load()
    model, step = Model(), tf.Variable(0, dtype=tf.int64, trainable=False)
    for path in tf.train.checkpoints_iterator(CHECKPOINTS, min_interval_secs=0.5, timeout=300):
        try:
            tf.train.Checkpoint(model=model, step=step).restore(path).expect_partial()
        except tf.errors.NotFoundError:  # the training has saved later ones since, and this one is gone
            continue
        print(f"step {int(step)} accuracy {model.accuracy(pictures, labels):.3f}", flush=True)
        if int(step) >= STEPS:
            return
    sys.exit("no checkpoint came for five minutes")


if role == "evaluator":
    evaluate()
elif "ps" in spec and role in ("ps", "worker"):
    tf.distribute.Server(resolver.cluster_spec(), job_name=role, task_index=index, protocol="grpc").join()
elif "ps" in spec:
    parameters = tf.distribute.experimental.ParameterServerStrategy(resolver)
    try:
        train(parameters, tf.distribute.coordinator.ClusterCoordinator(parameters))
    except tf.errors.UnavailableError as error:
        print(f"a parameter server is gone, and with it its variables: {error.message}", flush=True)
        sys.exit(START_AGAIN)
elif spec:
    train(tf.distribute.MultiWorkerMirroredStrategy())
else:
    train(tf.distribute.get_strategy())
