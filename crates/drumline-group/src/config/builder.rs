//! One method for each setting. Programs that use these methods still compile when a setting is added.

use std::{net::IpAddr, ops::RangeInclusive, path::PathBuf, time::Duration};

use drumline_schedule::{Rounding, SumOrder};
use drumline_store::auth::{Level, Secret};

use crate::{Config, algorithms::PriceSource, config::DebugLevel, trace::Trace};

/// For each method: the name of its field, what it takes, and what it assigns to the field.
macro_rules! setters {
    ($($name:ident($taken:ty) = $becomes:expr;)*) => {
        impl Config {
            $(
                #[doc = concat!("Sets [`", stringify!($name), "`](Config#structfield.", stringify!($name), ").")]
                #[must_use]
                pub fn $name(mut self, $name: $taken) -> Config {
                    self.$name = $becomes;
                    self
                }
            )*
        }
    };
}

setters! {
    timeout(Duration) = timeout;
    backend(impl Into<String>) = Some(backend.into());
    mpi_library(impl Into<PathBuf>) = Some(mpi_library.into());
    cuda_library(impl Into<PathBuf>) = Some(cuda_library.into());
    nccl_library(impl Into<PathBuf>) = Some(nccl_library.into());
    all_reduce(impl Into<String>) = Some(all_reduce.into());
    prices(PriceSource) = prices;
    bind_addresses(Vec<IpAddr>) = bind_addresses;
    socket_ifname(impl Into<String>) = Some(socket_ifname.into());
    port_range(impl Into<Option<RangeInclusive<u16>>>) = port_range.into();
    streams(usize) = streams;
    unix_sockets(bool) = unix_sockets;
    spread_over_cores(bool) = spread_over_cores;
    shared_memory(bool) = shared_memory;
    memory_node(impl Into<Option<usize>>) = memory_node.into();
    window_bytes(usize) = window_bytes;
    registered_bytes_max(impl Into<Option<usize>>) = registered_bytes_max.into();
    object_bytes_max(usize) = object_bytes_max;
    sum_order(SumOrder) = sum_order;
    rounding(Rounding) = rounding;
    warn_after(Duration) = warn_after;
    debug(DebugLevel) = debug;
    min_ranks(impl Into<Option<usize>>) = min_ranks.into();
    secret(impl Into<Option<Secret>>) = secret.into();
    security(Level) = security;
    trust_store(bool) = trust_store;
    store_bytes_max(usize) = store_bytes_max;
    trace(impl Into<Option<Trace>>) = trace.into();
}
