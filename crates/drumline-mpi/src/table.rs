//! The functions of MPI that are used here, for handles of either width.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::mem::transmute;
use std::path::Path;
use std::ptr::{NonNull, null_mut};

use crate::abi::{Abi, Handle, Handles, Level, Scalars};
use crate::error::{Error, Result};
use crate::number::{Number, Op};
use drumline_loader::Library;

/// `MPI_Status` has 20 to 32 bytes, by ABI.
type Status = [u64; 8];

/// A text of MPI with its zero: 8,192 in MPICH, 256 in Open MPI.
const TEXT_MAX: usize = 8192;

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($argument:ty),*);)*) => {
        /// Functions of one library. A field is an address of the type that the standard gives the function.
        struct Functions<H> {
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl<H: Handle> Functions<H> {
            fn find(library: Library, path: &Path) -> Result<Functions<H>> {
                Ok(Functions {
                    $($field: {
                        let address = find(library, path, $name)?;
                        // SAFETY: the library is an MPI, so its function of this name has the type that the standard
                        // gives it. `H` is as wide as the library's handles, which its ABI says.
                        unsafe {
                            transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(address.as_ptr())
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    init_thread = "MPI_Init_thread": fn(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int);
    initialized = "MPI_Initialized": fn(*mut c_int);
    query_thread = "MPI_Query_thread": fn(*mut c_int);
    finalized = "MPI_Finalized": fn(*mut c_int);
    finalize = "MPI_Finalize": fn();
    error_string = "MPI_Error_string": fn(c_int, *mut c_char, *mut c_int);
    comm_rank = "MPI_Comm_rank": fn(H, *mut c_int);
    comm_size = "MPI_Comm_size": fn(H, *mut c_int);
    comm_set_errhandler = "MPI_Comm_set_errhandler": fn(H, H);
    comm_group = "MPI_Comm_group": fn(H, *mut H);
    comm_create_group = "MPI_Comm_create_group": fn(H, H, c_int, *mut H);
    group_incl = "MPI_Group_incl": fn(H, c_int, *const c_int, *mut H);
    group_free = "MPI_Group_free": fn(*mut H);
    test = "MPI_Test": fn(*mut H, *mut c_int, *mut Status);
    isend = "MPI_Isend": fn(*const c_void, c_int, H, c_int, c_int, H, *mut H);
    improbe = "MPI_Improbe": fn(c_int, c_int, H, *mut c_int, *mut H, *mut Status);
    imrecv = "MPI_Imrecv": fn(*mut c_void, c_int, H, *mut H, *mut H);
    get_count = "MPI_Get_count": fn(*const Status, H, *mut c_int);
    ibarrier = "MPI_Ibarrier": fn(H, *mut H);
    ibcast = "MPI_Ibcast": fn(*mut c_void, c_int, H, c_int, H, *mut H);
    iallgather = "MPI_Iallgather": fn(*const c_void, c_int, H, *mut c_void, c_int, H, H, *mut H);
    iallgatherv = "MPI_Iallgatherv":
        fn(*const c_void, c_int, H, *mut c_void, *const c_int, *const c_int, H, H, *mut H);
    igatherv = "MPI_Igatherv":
        fn(*const c_void, c_int, H, *mut c_void, *const c_int, *const c_int, H, c_int, H, *mut H);
    iscatterv = "MPI_Iscatterv":
        fn(*const c_void, *const c_int, *const c_int, H, *mut c_void, c_int, H, c_int, H, *mut H);
    ialltoallv = "MPI_Ialltoallv":
        fn(*const c_void, *const c_int, *const c_int, H, *mut c_void, *const c_int, *const c_int, H, H, *mut H);
    iallreduce = "MPI_Iallreduce": fn(*const c_void, *mut c_void, c_int, H, H, H, *mut H);
    ireduce = "MPI_Ireduce": fn(*const c_void, *mut c_void, c_int, H, H, c_int, H, *mut H);
    ireduce_scatter_block = "MPI_Ireduce_scatter_block":
        fn(*const c_void, *mut c_void, c_int, H, H, H, *mut H);
}

/// A handle of a communicator, a request or a message, whatever its width.
pub(crate) type Bits = usize;

/// What a call of MPI may read and write until it is over.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) send: Vec<u8>,
    pub(crate) receive: Vec<u8>,
    /// Counts and displacements.
    pub(crate) layout: Vec<c_int>,
}

/// A non-blocking call. Counts are bytes, except where numbers are combined.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    Barrier,
    /// In place, in `receive`.
    Broadcast {
        len: c_int,
        root: c_int,
    },
    /// In place: blocks of equal length in `receive`.
    AllGather {
        each: c_int,
    },
    /// In place: counts and displacements in `layout`.
    AllGatherUneven,
    /// `layout` is empty unless this is the root.
    Gather {
        len: c_int,
        root: c_int,
    },
    /// `layout` is empty unless this is the root.
    Scatter {
        len: c_int,
        root: c_int,
    },
    /// `layout`: counts and displacements of what is sent, and then of what is received.
    AllToAll,
    /// In place, in `receive`.
    AllReduce {
        count: c_int,
        number: Number,
        op: Op,
    },
    /// In place at the root; elsewhere `receive` is only read.
    Reduce {
        count: c_int,
        number: Number,
        op: Op,
        root: c_int,
        is_root: bool,
    },
    /// In place: the result is at the front of `receive`.
    ReduceScatter {
        each: c_int,
        number: Number,
        op: Op,
    },
    Send {
        len: c_int,
        to: c_int,
        tag: c_int,
    },
    Receive {
        len: c_int,
        message: Bits,
    },
}

/// A message that MPI has matched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) message: Bits,
    pub(crate) from: c_int,
    pub(crate) len: c_int,
}

/// One library's functions, whatever the width of its handles.
///
/// Where a function does not say so, its caller sees to it that MPI is initialised and not finalised, and that no other
/// thread calls MPI unless MPI lets several threads call it.
pub(crate) trait Calls: Send + Sync + fmt::Debug {
    /// At any time.
    fn is_initialised(&self) -> Result<bool>;
    /// At any time.
    fn is_finalised(&self) -> Result<bool>;
    /// Before MPI was initialised; once.
    fn initialise(&self) -> Result<Level>;
    fn level(&self) -> Result<Level>;
    fn finalise(&self) -> Result<()>;
    fn world(&self) -> Bits;
    fn rank(&self, communicator: Bits) -> Result<c_int>;
    fn size(&self, communicator: Bits) -> Result<c_int>;
    /// Errors of this communicator are returned from now on.
    fn return_errors(&self, communicator: Bits) -> Result<()>;
    /// A communicator of some ranks of the world. Blocks until all of them call it.
    fn create_group(&self, ranks: &[c_int], tag: c_int) -> Result<Bits>;
    /// Begins a call.
    ///
    /// # Safety
    ///
    /// `memory` is neither freed nor touched before [`Calls::is_over`] has said that the request is over. What
    /// `operation` and `memory.layout` say lies within the buffers.
    unsafe fn begin(
        &self,
        communicator: Bits,
        operation: Operation,
        memory: &mut Memory,
    ) -> Result<Bits>;
    /// Whether a request is over. After that it is gone.
    fn is_over(&self, request: &mut Bits) -> Result<bool>;
    /// `None`: from any rank.
    fn probe(&self, communicator: Bits, from: Option<c_int>, tag: c_int) -> Result<Option<Found>>;
}

/// The functions and constants of one library.
struct Table<H> {
    functions: Functions<H>,
    handles: Handles<H>,
    scalars: Scalars,
}

/// What a library says of itself before it is initialised.
#[derive(Debug)]
pub(crate) struct Card {
    /// `MPI_Get_library_version`.
    pub(crate) text: String,
    /// Whether `MPI_Abi_get_version` says that it has the standard's ABI.
    pub(crate) is_standard: bool,
    /// The version of the standard.
    pub(crate) standard: (u32, u32),
}

/// Asks a library what it is. `path` is for errors.
pub(crate) fn card(library: Library, path: &Path) -> Result<Card> {
    type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
    type Text = unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int;
    let version = |address: NonNull<c_void>| {
        // SAFETY: it is called for MPI_Get_version and MPI_Abi_get_version, which have this type in every ABI.
        let function = unsafe { transmute::<*mut c_void, Version>(address.as_ptr()) };
        let (mut major, mut minor) = (-1, -1);
        // SAFETY: both may be called before MPI is initialised, and write two integers.
        unsafe { function(&raw mut major, &raw mut minor) };
        (major, minor)
    };
    // Without this function it is no MPI, so nothing of it is called.
    find(library, path, "MPI_Init_thread")?;
    let (major, minor) = version(find(library, path, "MPI_Get_version")?);
    let text = find(library, path, "MPI_Get_library_version")?;
    // SAFETY: the function has this type in every ABI.
    let text = unsafe { transmute::<*mut c_void, Text>(text.as_ptr()) };
    // SAFETY: it may be called before MPI is initialised, and writes one text.
    let text = read_text(|buffer, len| unsafe { text(buffer, len) });
    Ok(Card {
        text,
        is_standard: library
            .symbol(c"MPI_Abi_get_version")
            .is_some_and(|address| version(address).0 >= 1),
        standard: (major.max(0) as u32, minor.max(0) as u32),
    })
}

/// The functions of a library that has this ABI.
pub(crate) fn calls(library: Library, path: &Path, abi: Abi) -> Result<Box<dyn Calls>> {
    fn table<H: Handle>(library: Library, path: &Path, abi: Abi) -> Result<Box<dyn Calls>> {
        let address = |name: &str| find(library, path, name).map(|address| address.addr().get());
        Ok(Box::new(Table::<H> {
            functions: Functions::find(library, path)?,
            handles: Handles::of(abi, address)?,
            scalars: Scalars::of(abi),
        }))
    }
    match abi {
        Abi::Standard | Abi::OpenMpi => table::<usize>(library, path, abi),
        Abi::Mpich => table::<c_int>(library, path, abi),
    }
}

impl<H: Handle> Table<H> {
    fn check(&self, function: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: a code that MPI has returned has a text, which fits the buffer.
        let text =
            read_text(|buffer, len| unsafe { (self.functions.error_string)(code, buffer, len) });
        let text = if text.is_empty() { format!("error {code}") } else { text };
        Err(Error::Call { function, text })
    }
}

impl<H: Handle> Calls for Table<H> {
    fn is_initialised(&self) -> Result<bool> {
        let mut flag = 0;
        // SAFETY: it may be called at any time, and writes one integer.
        self.check("MPI_Initialized", unsafe { (self.functions.initialized)(&raw mut flag) })?;
        Ok(flag != 0)
    }

    fn is_finalised(&self) -> Result<bool> {
        let mut flag = 0;
        // SAFETY: it may be called at any time, and writes one integer.
        self.check("MPI_Finalized", unsafe { (self.functions.finalized)(&raw mut flag) })?;
        Ok(flag != 0)
    }

    fn initialise(&self) -> Result<Level> {
        let (wanted, mut provided) = (self.scalars.level(Level::Multiple), 0);
        // SAFETY: MPI takes null for the arguments of the program, and writes one integer.
        let code = unsafe {
            (self.functions.init_thread)(null_mut(), null_mut(), wanted, &raw mut provided)
        };
        self.check("MPI_Init_thread", code)?;
        Ok(self.scalars.provided(provided))
    }

    fn level(&self) -> Result<Level> {
        let mut provided = 0;
        // SAFETY: MPI is initialised; it writes one integer.
        self.check("MPI_Query_thread", unsafe {
            (self.functions.query_thread)(&raw mut provided)
        })?;
        Ok(self.scalars.provided(provided))
    }

    fn finalise(&self) -> Result<()> {
        // SAFETY: MPI is initialised, and nobody calls it after this: who wants to asks first.
        self.check("MPI_Finalize", unsafe { (self.functions.finalize)() })
    }

    fn world(&self) -> Bits {
        self.handles.world.bits()
    }

    fn rank(&self, communicator: Bits) -> Result<c_int> {
        let mut rank = -1;
        // SAFETY: the communicator is one of this library; one integer is written.
        let code = unsafe { (self.functions.comm_rank)(H::from_bits(communicator), &raw mut rank) };
        self.check("MPI_Comm_rank", code)?;
        Ok(rank)
    }

    fn size(&self, communicator: Bits) -> Result<c_int> {
        let mut size = -1;
        // SAFETY: the communicator is one of this library; one integer is written.
        let code = unsafe { (self.functions.comm_size)(H::from_bits(communicator), &raw mut size) };
        self.check("MPI_Comm_size", code)?;
        Ok(size)
    }

    fn return_errors(&self, communicator: Bits) -> Result<()> {
        let (communicator, handler) = (H::from_bits(communicator), self.handles.errors_return);
        // SAFETY: both handles are of this library.
        let code = unsafe { (self.functions.comm_set_errhandler)(communicator, handler) };
        self.check("MPI_Comm_set_errhandler", code)
    }

    fn create_group(&self, ranks: &[c_int], tag: c_int) -> Result<Bits> {
        let Functions { comm_group, group_incl, group_free, comm_create_group, .. } =
            self.functions;
        let nothing = H::from_bits(0);
        let (mut all, mut some, mut made) = (nothing, nothing, nothing);
        let count = ranks.len() as c_int;
        // SAFETY: `count` numbers of ranks are read, and handles are written. The handles that are read are those that
        // the call before has written.
        unsafe {
            self.check("MPI_Comm_group", comm_group(self.handles.world, &raw mut all))?;
            self.check("MPI_Group_incl", group_incl(all, count, ranks.as_ptr(), &raw mut some))?;
            let code = comm_create_group(self.handles.world, some, tag, &raw mut made);
            self.check("MPI_Comm_create_group", code)?;
            self.check("MPI_Group_free", group_free(&raw mut some))?;
            self.check("MPI_Group_free", group_free(&raw mut all))?;
        }
        Ok(made.bits())
    }

    unsafe fn begin(
        &self,
        communicator: Bits,
        operation: Operation,
        memory: &mut Memory,
    ) -> Result<Bits> {
        let Functions {
            isend, imrecv, ibarrier, ibcast, iallgather, iallgatherv, igatherv, ..
        } = self.functions;
        let Functions { iscatterv, ialltoallv, iallreduce, ireduce, ireduce_scatter_block, .. } =
            self.functions;
        let (comm, byte) = (H::from_bits(communicator), self.handles.byte);
        let number = |number| self.handles.number(number);
        let of = |op| self.handles.op(op);
        let in_place = self.scalars.in_place as *const c_void;
        let [nothing_sent, nothing_comes] = &NO_BYTES;
        let send = address(&mut memory.send, nothing_sent).cast_const();
        let receive = address(&mut memory.receive, nothing_comes);
        // The quarters of the layout of an all-to-all, and the halves of every other one.
        let part =
            memory.layout.len() / if matches!(operation, Operation::AllToAll) { 4 } else { 2 };
        let layout = memory.layout.as_ptr();
        let [counts, places] = [0, 1].map(|at| layout.wrapping_add(at * part));
        let mut request = H::from_bits(0);
        let out = &raw mut request;
        // SAFETY: all handles are of this library. The caller promises that buffers and layout stay until the request is
        // over, and that what MPI is told lies within them.
        let (function, code) = unsafe {
            match operation {
                Operation::Barrier => ("MPI_Ibarrier", ibarrier(comm, out)),
                Operation::Broadcast { len, root } => {
                    ("MPI_Ibcast", ibcast(receive, len, byte, root, comm, out))
                }
                Operation::AllGather { each } => (
                    "MPI_Iallgather",
                    iallgather(in_place, 0, byte, receive, each, byte, comm, out),
                ),
                Operation::AllGatherUneven => (
                    "MPI_Iallgatherv",
                    iallgatherv(in_place, 0, byte, receive, counts, places, byte, comm, out),
                ),
                Operation::Gather { len, root } => (
                    "MPI_Igatherv",
                    igatherv(send, len, byte, receive, counts, places, byte, root, comm, out),
                ),
                Operation::Scatter { len, root } => (
                    "MPI_Iscatterv",
                    iscatterv(send, counts, places, byte, receive, len, byte, root, comm, out),
                ),
                Operation::AllToAll => {
                    let [come, to] = [2, 3].map(|at| layout.wrapping_add(at * part));
                    (
                        "MPI_Ialltoallv",
                        ialltoallv(send, counts, places, byte, receive, come, to, byte, comm, out),
                    )
                }
                Operation::AllReduce { count, number: kind, op } => (
                    "MPI_Iallreduce",
                    iallreduce(in_place, receive, count, number(kind), of(op), comm, out),
                ),
                Operation::Reduce { count, number: kind, op, root, is_root } => {
                    let from = if is_root { in_place } else { receive.cast_const() };
                    let to = if is_root { receive } else { null_mut() };
                    ("MPI_Ireduce", ireduce(from, to, count, number(kind), of(op), root, comm, out))
                }
                Operation::ReduceScatter { each, number: kind, op } => (
                    "MPI_Ireduce_scatter_block",
                    ireduce_scatter_block(in_place, receive, each, number(kind), of(op), comm, out),
                ),
                Operation::Send { len, to, tag } => {
                    ("MPI_Isend", isend(send, len, byte, to, tag, comm, out))
                }
                Operation::Receive { len, message } => {
                    let mut message = H::from_bits(message);
                    ("MPI_Imrecv", imrecv(receive, len, byte, &raw mut message, out))
                }
            }
        };
        self.check(function, code)?;
        Ok(request.bits())
    }

    fn is_over(&self, request: &mut Bits) -> Result<bool> {
        let (mut handle, mut flag) = (H::from_bits(*request), 0);
        let ignore = self.scalars.status_ignore as *mut Status;
        // SAFETY: the request is one of this library that is not over. MPI does not write to the status that it is told
        // to ignore.
        let code = unsafe { (self.functions.test)(&raw mut handle, &raw mut flag, ignore) };
        *request = handle.bits();
        self.check("MPI_Test", code)?;
        Ok(flag != 0)
    }

    fn probe(&self, communicator: Bits, from: Option<c_int>, tag: c_int) -> Result<Option<Found>> {
        let from = from.unwrap_or(self.scalars.any_source);
        let (mut flag, mut message, mut status) = (0, H::from_bits(0), Status::default());
        let (communicator, byte) = (H::from_bits(communicator), self.handles.byte);
        // SAFETY: the communicator is one of this library. `Status` has room for the status of every ABI.
        let code = unsafe {
            let Functions { improbe, .. } = self.functions;
            improbe(from, tag, communicator, &raw mut flag, &raw mut message, &raw mut status)
        };
        self.check("MPI_Improbe", code)?;
        if flag == 0 {
            return Ok(None);
        }
        let mut len = -1;
        // SAFETY: the status is the one that MPI has just written.
        let code = unsafe { (self.functions.get_count)(&raw const status, byte, &raw mut len) };
        self.check("MPI_Get_count", code)?;
        let half = status[self.scalars.source_at / 2].to_ne_bytes();
        let at = self.scalars.source_at % 2 * 4;
        let from = c_int::from_ne_bytes([half[at], half[at + 1], half[at + 2], half[at + 3]]);
        Ok(Some(Found { message: message.bits(), from, len }))
    }
}

impl<H> fmt::Debug for Table<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("scalars", &self.scalars).finish_non_exhaustive()
    }
}

/// A function or variable of the library.
fn find(library: Library, path: &Path, name: &str) -> Result<NonNull<c_void>> {
    let found = CString::new(name).ok().and_then(|name| library.symbol(&name));
    found.ok_or_else(|| Error::Symbol { path: path.to_owned(), name: name.to_owned() })
}

/// What vectors without memory stand for: to send, and to receive.
static NO_BYTES: [u8; 2] = [0; 2];

/// Where a buffer begins. That of a vector without memory is 1, which MPI takes for `MPI_IN_PLACE`. It gets another one,
/// which is not used, since no byte is moved there. The two of a call differ: Open MPI 4 takes equal ones for
/// `MPI_IN_PLACE`, too, and an all-to-all in which a rank has nothing to do then never ends.
fn address(buffer: &mut Vec<u8>, if_empty: &'static u8) -> *mut c_void {
    match buffer.capacity() {
        0 => (&raw const *if_empty).cast_mut().cast(),
        _ => buffer.as_mut_ptr().cast(),
    }
}

/// A text that MPI writes.
fn read_text(write: impl FnOnce(*mut c_char, *mut c_int) -> c_int) -> String {
    let (mut buffer, mut len) = (vec![0_u8; TEXT_MAX], 0);
    write(buffer.as_mut_ptr().cast(), &raw mut len);
    let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    text.to_string_lossy().trim().to_owned()
}
