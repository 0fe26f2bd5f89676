# The public names by their homes: type checkers read them here, and so does __init__.py.
from .networks.registry import build_network as build_network
from .networks.registry import network_names as network_names
from .own_task import OwnTask as OwnTask
from .tasks import build_task as build_task
from .tasks import task_names as task_names
