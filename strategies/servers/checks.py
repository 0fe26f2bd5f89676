"""Which options and models a group of parameter servers can train."""

from strategies.servers.options import ServersOptions
from strategies.servers.piece_update import check_rule
from strategies.synchronous import SynchronousStrategy
from towers.errors import UserError
from towers.layers.batch_norm.calls import batch_norm_layers
from towers.options import StepOptions


def check_options(options: StepOptions, servers: ServersOptions, num_workers: int) -> None:
    """Raises UserError for options that parameter servers do not support."""
    check_rule(options.rule)
    if options.precision == "float16":
        raise UserError(
            "precision=float16 with strategy=ps: workers do not share a loss scale; use precision=bfloat16"
        )
    if servers.is_sync and options.clipping.norm is not None:
        raise UserError(
            f"clip_norm={options.clipping.norm:g} with staleness=sync: no server holds a whole parameter's mean "
            "gradient; use clip_global_norm=1"
        )
    if servers.backup_workers >= num_workers:
        raise UserError(
            f"backup_workers={servers.backup_workers} with {num_workers} workers: a step needs the gradient of at "
            f"least one worker; use at most backup_workers={num_workers - 1}"
        )


def check_model(strategy: SynchronousStrategy, servers: ServersOptions, num_workers: int) -> None:
    """Raises UserError for a model that parameter servers can't train with the strategy's options."""
    options, engine = strategy.options, strategy.engine
    if engine.placement.constraints:
        named = ", ".join(engine.placement.constraints)
        raise UserError(
            f"constraint on {named} with strategy=ps: a constraint needs the whole parameter, and servers "
            "hold pieces; remove the constraint or use another strategy"
        )
    several = servers.is_sync and num_workers > 1
    if several and options.batch_stats == "synced" and batch_norm_layers(strategy.model):
        raise UserError(
            "batch_stats=synced with staleness=sync: workers exchange nothing within a step; "
            "use batch_stats=average"
        )
    dtypes = sorted({value.dtype.name for value in engine.parameters().values()})
    if len(dtypes) > 1:
        raise UserError(
            f"parameters of {' and '.join(dtypes)} with strategy=ps: servers hold all parameters in one "
            "vector; build the model with one dtype or use another strategy"
        )
    if servers.is_sync and options.accumulation > 1 and engine.tower.variables.moving:
        raise UserError(
            f"accumulation={options.accumulation} with staleness=sync and batch statistics: workers "
            "exchange once a step, not once a microbatch; use accumulation=1 or strategy=ring"
        )
