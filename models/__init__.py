"""What is trained: networks (Keras 3, stock layers only), datasets, and the tasks that join them.

Networks take float32 images [N, H, W, C], already normalised, and give float32 logits [N, num_classes].
`models.networks.registry` builds them by name. This room knows `towers`, never `strategies` or `launch`.
"""

from models.networks.registry import build_network, network_names
from models.own_task import OwnTask
from models.tasks import build_task, task_names

__all__ = ["OwnTask", "build_network", "build_task", "network_names", "task_names"]
