//! What an operation would take on a cluster: the schedules of all ranks, replayed on its figures.
//!
//! Nothing is sent here and nothing is added. Every rank walks through its real schedule; steps take
//! the time that a [`PriceList`] says, and wait for what they share:
//!
//! | step | takes | waits for |
//! |---|---|---|
//! | send, receive | half of `message_ps` and of `byte` at each end, `round_ps` between | the line out of the sender's host and that into the receiver's, if these are two |
//! | reduce, copy | `touch_ps` for each place, `combine`, `copy` and `slot_byte_fs` or `shared_slot_byte_fs` for each byte | the memory of the host |
//! | post | `post_ps` until a neighbour sees it | |
//!
//! Whatever a rank does takes a core of its host while it does it, and so does to go on after a wait. A
//! rank keeps to its core unless another one would be free a millisecond sooner. A core takes `switch_ps` to change from
//! one rank to another, and goes on with the one that it has if both could. Where an algorithm is
//! [pipelined](crate::Pipeline), a message counts once for each window of 1 MiB. Each shared thing serves
//! in the order of asking. A message streams: its receiver begins when it begins to arrive, and is not
//! done before its last byte is there. The network between the hosts' lines is never the narrowest place.
//!
//! Of the buffers that the ranks of a core work on, as much as `cache_bytes` stays in the caches; each byte
//! beyond is moved from memory or to it, which is what `memory_fs` is more than `cached_fs`.
//!
//! Events are taken in the order of time, and all times are integers: the same question has the same
//! answer everywhere.
//!
//! ```
//! use drumline_schedule::{Algorithm, Collective, Topology, price::{ElementKind, PriceList}};
//! use drumline_inspect::replay::{Cluster, Workload, replay};
//!
//! // 16 hosts of 8 ranks, lines of 25 Gb/s.
//! let prices = PriceList { nic_byte_fs: 320_000, ..PriceList::default() };
//! let cluster = Cluster { cores_per_host: 64, ..Cluster::new(Topology::hosts(&[8; 16]), prices) };
//! let time_of = |name| {
//!     let algorithm = Algorithm::find(Collective::AllReduce, name)?;
//!     let f32 = ElementKind { bytes: 4, sum_bytes: 4 };
//!     replay(&cluster, &Workload { algorithm, root: 0, elements: 1 << 24, kind: f32 })
//! };
//! // Hosts that add their own ranks first have less to send.
//! assert!(time_of("hierarchical-push")?.time_ps < time_of("halving")?.time_ps);
//! # Ok::<_, drumline_schedule::Error>(())
//! ```

mod cluster;
mod engine;
mod hosts;
mod program;
mod run;
mod training;

pub use cluster::{Cluster, Method, Outcome, Workload};
pub use run::{line_bound, replay, replay_in_a_row};
pub use training::{Training, TrainingStep};
