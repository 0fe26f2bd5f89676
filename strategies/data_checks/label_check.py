"""Labels out of range, found after a loss that is not finite.

On a CPU the cross-entropy of classes raises an error for such a label. On a GPU it returns NaN, which does not
show the cause. So the loss of the same batch is computed again on a CPU, with zeros as outputs: then only the
labels decide whether it raises.
"""

from typing import Any

import keras
import tensorflow as tf

from strategies.data_checks.data_errors import out_of_range
from towers.devices import HOST
from towers.errors import UserError
from towers.input.unprepared import with_features
from towers.task import Batch, Task, batch_length


def labels_out_of_range(task: Task, model: keras.Model, batch: Batch, where: str) -> UserError | None:
    """The UserError for a label that is not a class of the model's outputs; None if all labels are.

    Args:
      task: gives the loss.
      model: gives the shapes of the outputs; it is not run.
      batch: the batch as the engine got it.
      where: the step, for the message.
    """
    with tf.device(HOST):
        try:
            batch = with_features(task, batch)
            task.loss(_zero_outputs(model, batch), batch)
        except tf.errors.InvalidArgumentError as error:
            return out_of_range(error, where, only_labels=True)
        except Exception:  # a custom call or loss that can't be computed in this way: the cause stays unknown
            return None
    return None


def _zero_outputs(model: keras.Model, batch: Batch) -> Any:
    """Zeros in the shapes of the model's outputs; the model is not run."""
    specs = tf.nest.map_structure(tf.type_spec_from_value, batch.features)
    given = tf.nest.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), specs)
    num_examples = int(batch_length(batch))
    return tf.nest.map_structure(
        lambda spec: tf.zeros([num_examples, *spec.shape[1:]], spec.dtype), model.compute_output_spec(given)
    )
