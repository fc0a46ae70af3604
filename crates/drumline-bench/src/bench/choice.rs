//! The values that options choose from, by name.

use std::fmt;

use drumline::{DType, ReduceOp};

/// Chosen values, in the order in which the user named them, none of them twice.
#[derive(Clone, Debug)]
pub(super) struct List<T> {
    pub(super) items: Vec<T>,
    /// Whether the user wrote `all`: then values that make no sense are left out.
    pub(super) is_all: bool,
}

impl<T: fmt::Display> fmt::Display for List<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.items.iter().map(T::to_string).collect();
        f.write_str(&names.join(","))
    }
}

/// A type whose values an option chooses from.
pub(super) trait Choice: Copy + PartialEq + fmt::Display + 'static {
    /// The values that `all` stands for.
    const ALL: &'static [Self];

    /// Further values, which `all` does not stand for.
    const OTHERS: &'static [Self] = &[];
}

/// Parses names with commas between them, or `all`.
pub(super) fn list<T: Choice>(text: &str) -> Result<List<T>, String> {
    if text == "all" {
        return Ok(List { items: T::ALL.to_vec(), is_all: true });
    }
    let known = || T::OTHERS.iter().chain(T::ALL);
    let mut items = Vec::new();
    for name in text.split(',').map(str::trim) {
        let item = known().find(|item| item.to_string() == name).copied().ok_or_else(|| {
            let names: Vec<String> = known().map(T::to_string).collect();
            format!("{name:?} is none of {}, all", names.join(", "))
        })?;
        if !items.contains(&item) {
            items.push(item);
        }
    }
    Ok(List { items, is_all: false })
}

impl Choice for DType {
    const ALL: &'static [DType] = &DType::ALL;
}

impl Choice for ReduceOp {
    const ALL: &'static [ReduceOp] = &ReduceOp::ALL;
}

/// Defines an enum with the names of its variants. `all` stands for the variants before the semicolon.
macro_rules! choice {
    ($(#[$doc:meta])* $type:ident {
        $($(#[$item_doc:meta])* $item:ident = $name:literal),*
        $(; $other:ident = $other_name:literal)?
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(super) enum $type {
            $($(#[$item_doc])* $item,)*
            $($other,)?
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(match self {
                    $($type::$item => $name,)*
                    $($type::$other => $other_name,)?
                })
            }
        }

        impl Choice for $type {
            const ALL: &'static [$type] = &[$($type::$item),*];
            const OTHERS: &'static [$type] = &[$($type::$other)?];
        }
    };
}
pub(super) use choice;

choice! {
    /// What carries the data between ranks of one host.
    Transport { Shm = "shm", Unix = "unix", Tcp = "tcp"; Auto = "auto" }
}

choice! {
    /// Which memory holds the data.
    Buffers { Staged = "staged", Registered = "registered" }
}

choice! {
    /// How an operation is called.
    CallStyle { Blocking = "blocking", Async = "async" }
}
