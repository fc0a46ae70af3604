//! The constants of each binary interface, as tables: a row for each constant, a column for each interface.

use std::ffi::c_int;
use std::fmt;

use crate::number::{Number, Op};

/// How a library of MPI lays out its constants and its handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abi {
    /// The interface of the MPI standard, version 5: MPICH 5, Intel MPI, Open MPI 6. Handles are pointers.
    Standard,
    /// That of MPICH, which Intel MPI, MVAPICH and Cray MPICH share. Handles are 32-bit integers.
    Mpich,
    /// That of Open MPI. Handles are pointers to variables of the library.
    OpenMpi,
}

impl fmt::Display for Abi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Abi::Standard => "the MPI standard's ABI",
            Abi::Mpich => "MPICH's ABI",
            Abi::OpenMpi => "Open MPI's ABI",
        })
    }
}

/// Which threads may call MPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// There is only one thread.
    Single,
    /// Only the main thread.
    Funneled,
    /// All, one at a time.
    Serialized,
    /// All, at any time.
    Multiple,
}

impl Level {
    const ALL: [Level; 4] = [Level::Single, Level::Funneled, Level::Serialized, Level::Multiple];
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Level::Single => "MPI_THREAD_SINGLE",
            Level::Funneled => "MPI_THREAD_FUNNELED",
            Level::Serialized => "MPI_THREAD_SERIALIZED",
            Level::Multiple => "MPI_THREAD_MULTIPLE",
        })
    }
}

/// Constants that are plain numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalars {
    pub(crate) in_place: usize,
    pub(crate) status_ignore: usize,
    pub(crate) any_source: c_int,
    /// In the order of [`Level::ALL`].
    levels: [c_int; 4],
    /// The place of `MPI_SOURCE` in `MPI_Status`, in integers.
    pub(crate) source_at: usize,
}

impl Scalars {
    pub(crate) fn of(abi: Abi) -> Scalars {
        let row = |in_place, status_ignore, any_source, levels, source_at| Scalars {
            in_place,
            status_ignore,
            any_source,
            levels,
            source_at,
        };
        match abi {
            Abi::Standard => row(1, 0, -1, [0, 1024, 2048, 4096], 0),
            Abi::OpenMpi => row(1, 0, -1, [0, 1, 2, 3], 0),
            Abi::Mpich => row(usize::MAX, 1, -2, [0, 1, 2, 3], 2),
        }
    }

    /// What MPI calls `level`.
    pub(crate) fn level(&self, level: Level) -> c_int {
        self.levels[level as usize]
    }

    /// The highest level that `provided` reaches.
    pub(crate) fn provided(&self, provided: c_int) -> Level {
        let reached = Level::ALL.into_iter().rev().find(|&level| self.level(level) <= provided);
        reached.unwrap_or(Level::Single)
    }
}

/// A handle of MPI. Its width is in the type, so that the signatures of MPI's functions are exact.
pub(crate) trait Handle: Copy + Send + Sync + 'static {
    fn from_bits(bits: usize) -> Self;
    fn bits(self) -> usize;
}

/// A pointer: the standard's interface and Open MPI's.
impl Handle for usize {
    fn from_bits(bits: usize) -> usize {
        bits
    }

    fn bits(self) -> usize {
        self
    }
}

/// 32 bits: MPICH's interface.
impl Handle for c_int {
    fn from_bits(bits: usize) -> c_int {
        bits as u32 as c_int
    }

    fn bits(self) -> usize {
        self as u32 as usize
    }
}

/// A constant that is a handle: the variable of Open MPI whose address it is, and its bits in the other two interfaces.
type Row = (&'static str, usize, usize);

macro_rules! handles {
    ($($field:ident: $open_mpi:literal, $standard:literal, $mpich:literal;)*) => {
        /// Constants that are handles.
        #[derive(Debug)]
        pub(crate) struct Handles<H> {
            $(pub(crate) $field: H,)*
            numbers: [H; NUMBERS.len()],
            ops: [H; OPS.len()],
        }

        impl<H: Handle> Handles<H> {
            /// The constants of `abi`. `address` finds a variable of the library.
            pub(crate) fn of<E>(abi: Abi, address: impl Fn(&str) -> Result<usize, E>) -> Result<Self, E> {
                let find = |(open_mpi, standard, mpich): Row| {
                    Ok(H::from_bits(match abi {
                        Abi::Standard => standard,
                        Abi::Mpich => mpich,
                        Abi::OpenMpi => address(open_mpi)?,
                    }))
                };
                let (mut numbers, mut ops) = ([H::from_bits(0); NUMBERS.len()], [H::from_bits(0); OPS.len()]);
                for (place, (_, row)) in numbers.iter_mut().zip(NUMBERS) {
                    *place = find(row)?;
                }
                for (place, (_, row)) in ops.iter_mut().zip(OPS) {
                    *place = find(row)?;
                }
                Ok(Handles { $($field: find(($open_mpi, $standard, $mpich))?,)* numbers, ops })
            }
        }
    };
}

handles! {
    world:         "ompi_mpi_comm_world",    0x101, 0x4400_0000;
    byte:          "ompi_mpi_byte",          0x247, 0x4c00_010d;
    errors_return: "ompi_mpi_errors_return", 0x143, 0x5400_0001;
}

const NUMBERS: [(Number, Row); 12] = [
    (Number::I8, ("ompi_mpi_int8_t", 0x240, 0x4c00_0137)),
    (Number::U8, ("ompi_mpi_uint8_t", 0x241, 0x4c00_013b)),
    (Number::I16, ("ompi_mpi_int16_t", 0x248, 0x4c00_0238)),
    (Number::U16, ("ompi_mpi_uint16_t", 0x249, 0x4c00_023c)),
    (Number::I32, ("ompi_mpi_int32_t", 0x250, 0x4c00_0439)),
    (Number::U32, ("ompi_mpi_uint32_t", 0x251, 0x4c00_043d)),
    (Number::I64, ("ompi_mpi_int64_t", 0x258, 0x4c00_083a)),
    (Number::U64, ("ompi_mpi_uint64_t", 0x259, 0x4c00_083e)),
    (Number::F32, ("ompi_mpi_float", 0x210, 0x4c00_040a)),
    (Number::F64, ("ompi_mpi_double", 0x214, 0x4c00_080b)),
    (Number::Complex64, ("ompi_mpi_c_float_complex", 0x212, 0x4c00_0840)),
    (Number::Complex128, ("ompi_mpi_c_double_complex", 0x216, 0x4c00_1041)),
];

const OPS: [(Op, Row); 7] = [
    (Op::Sum, ("ompi_mpi_op_sum", 0x21, 0x5800_0003)),
    (Op::Min, ("ompi_mpi_op_min", 0x22, 0x5800_0002)),
    (Op::Max, ("ompi_mpi_op_max", 0x23, 0x5800_0001)),
    (Op::Product, ("ompi_mpi_op_prod", 0x24, 0x5800_0004)),
    (Op::BitAnd, ("ompi_mpi_op_band", 0x28, 0x5800_0006)),
    (Op::BitOr, ("ompi_mpi_op_bor", 0x29, 0x5800_0008)),
    (Op::BitXor, ("ompi_mpi_op_bxor", 0x2a, 0x5800_000a)),
];

impl<H: Handle> Handles<H> {
    pub(crate) fn number(&self, number: Number) -> H {
        self.numbers[number as usize]
    }

    pub(crate) fn op(&self, op: Op) -> H {
        self.ops[op as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stand_in_the_order_of_their_enums() {
        assert!(NUMBERS.iter().enumerate().all(|(at, it)| it.0 as usize == at));
        assert!(OPS.iter().enumerate().all(|(at, it)| it.0 as usize == at));
    }

    #[test]
    fn each_interface_has_its_own_column() {
        let none = |_: &str| Ok::<usize, ()>(7);
        let standard = Handles::<usize>::of(Abi::Standard, none).unwrap();
        assert_eq!(
            (standard.world, standard.number(Number::F32), standard.op(Op::BitXor)),
            (0x101, 0x210, 0x2a)
        );
        let mpich = Handles::<c_int>::of(Abi::Mpich, none).unwrap();
        assert_eq!(
            (mpich.byte, mpich.number(Number::Complex128), mpich.op(Op::Max)),
            (0x4c00_010d, 0x4c00_1041, 0x5800_0001)
        );
        let open_mpi = Handles::<usize>::of(Abi::OpenMpi, none).unwrap();
        assert_eq!((open_mpi.errors_return, open_mpi.op(Op::Sum)), (7, 7));
        let lacks =
            |name: &str| if name == "ompi_mpi_op_bor" { Err(name.to_owned()) } else { Ok(0) };
        assert_eq!(Handles::<usize>::of(Abi::OpenMpi, lacks).unwrap_err(), "ompi_mpi_op_bor");
    }

    #[test]
    fn handles_keep_their_bits() {
        for bits in [0, 0x4400_0000, 0x8400_0001, 0xffff_ffff] {
            assert_eq!(<c_int as Handle>::from_bits(bits).bits(), bits);
            assert_eq!(<usize as Handle>::from_bits(bits).bits(), bits);
        }
    }

    #[test]
    fn a_level_between_two_counts_as_the_lower() {
        let standard = Scalars::of(Abi::Standard);
        assert_eq!(standard.provided(4096), Level::Multiple);
        assert_eq!(standard.provided(2049), Level::Serialized);
        assert_eq!(standard.provided(-1), Level::Single);
        assert_eq!(Scalars::of(Abi::Mpich).provided(1), Level::Funneled);
        assert_eq!(Scalars::of(Abi::OpenMpi).level(Level::Multiple), 3);
    }
}
