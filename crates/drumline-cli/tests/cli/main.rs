//! The command `drumline`, as a user calls it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bench;
mod check;
mod closed;
mod ending;
mod error_files;
#[allow(dead_code)]
#[path = "../../../drumline-store/tests/store/etcd/server.rs"]
mod etcd;
mod first;
mod foreign;
mod guards;
mod hangs;
mod hosts;
#[path = "../../../drumline-mpi/tests/installed/mod.rs"]
mod installed;
mod launch;
mod left;
mod logs;
mod monitoring;
#[path = "../../../drumline/tests/hosts/mod.rs"]
mod network;
mod nodes;
mod options;
mod report;
mod restarts;
mod run;
mod trace;
mod unread;

use launch::HANG;
