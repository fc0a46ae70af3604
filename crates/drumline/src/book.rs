//! Runs the Rust of the book, page by page, and of the README.

#[doc = include_str!("../../../README.md")]
struct Readme;

#[doc = include_str!("../../../docs/start/collectives.md")]
struct Collectives;

#[doc = include_str!("../../../docs/guides/groups-and-messages.md")]
struct GroupsAndMessages;

#[doc = include_str!("../../../docs/guides/logs.md")]
struct Logs;

#[doc = include_str!("../../../docs/guides/backends.md")]
struct WritingBackends;

#[doc = include_str!("../../../docs/guides/adapters.md")]
struct Adapters;

#[cfg(feature = "device")]
#[doc = include_str!("../../../docs/guides/devices.md")]
struct Devices;

#[doc = include_str!("../../../docs/concepts/order-of-sums.md")]
struct OrderOfSums;

#[doc = include_str!("../../../docs/reference/types-and-operators.md")]
struct TypesAndOperators;

#[doc = include_str!("../../../docs/reference/async-reduce.md")]
struct AsyncReduce;
