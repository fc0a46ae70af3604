use crate::{Error, Result};

pub(super) fn check_rank(operation: &'static str, world_size: usize, rank: usize) -> Result<()> {
    if rank < world_size {
        return Ok(());
    }
    Err(Error::argument(
        operation,
        format!("there is no rank {rank} in a world of {world_size}; ranks count from 0"),
    ))
}
