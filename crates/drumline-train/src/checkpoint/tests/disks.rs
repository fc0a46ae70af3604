//! A disk that fails on request, and a disk that knows what a power cut would leave.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    ffi::OsString,
    io::{self, Cursor, ErrorKind, Write},
    path::Path,
    rc::Rc,
};

use super::super::disk::Disk;

/// What happens at the chosen operation.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// The operation is not carried out.
    Error(ErrorKind),
    /// The operation is carried out, but reports an error.
    DoneButError(ErrorKind),
    /// A write takes half of the bytes. Other operations are not affected.
    ShortWrite,
    /// A write takes half of the bytes, and no later write takes any.
    FullFromNowOn,
    /// Neither this operation nor any later one is carried out.
    Crash,
}

/// Makes the n-th operation on a disk fail. Reading a file does not count as an operation.
pub(super) struct Faulty<D> {
    disk: D,
    faults: Rc<Faults>,
}

struct Faults {
    fault: Fault,
    nth: usize,
    done: Cell<usize>,
}

impl<D> Faulty<D> {
    pub(super) fn new(disk: D, nth: usize, fault: Fault) -> Self {
        Self { disk, faults: Rc::new(Faults { fault, nth, done: Cell::new(0) }) }
    }

    /// Whether the n-th operation was reached.
    pub(super) fn was_reached(&self) -> bool {
        self.faults.done.get() > self.faults.nth
    }

    pub(super) fn inner(&self) -> &D {
        &self.disk
    }
}

impl Faults {
    /// The fault, if it affects the next operation.
    fn next(&self) -> Option<Fault> {
        let now = self.done.replace(self.done.get() + 1);
        let lasts = matches!(self.fault, Fault::FullFromNowOn | Fault::Crash);
        (now == self.nth || lasts && now > self.nth).then_some(self.fault)
    }

    fn run<T>(&self, operation: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        match self.next() {
            None | Some(Fault::ShortWrite | Fault::FullFromNowOn) => operation(),
            Some(Fault::Error(kind)) => Err(kind.into()),
            Some(Fault::DoneButError(kind)) => operation().and(Err(kind.into())),
            Some(Fault::Crash) => Err(ErrorKind::Other.into()),
        }
    }
}

pub(super) struct FaultyFile<F> {
    file: F,
    faults: Rc<Faults>,
    is_full: bool,
}

impl<F: Write> Write for FaultyFile<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let half = &bytes[..bytes.len().div_ceil(2)];
        match self.faults.next() {
            None => self.file.write(bytes),
            Some(Fault::ShortWrite) => self.file.write(half),
            Some(Fault::FullFromNowOn) if self.is_full => Err(ErrorKind::StorageFull.into()),
            Some(Fault::FullFromNowOn) => {
                self.is_full = true;
                self.file.write(half)
            }
            Some(Fault::Error(kind)) => Err(kind.into()),
            Some(Fault::DoneButError(kind)) => self.file.write(bytes).and(Err(kind.into())),
            Some(Fault::Crash) => Err(ErrorKind::Other.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl<D: Disk> Disk for Faulty<D> {
    type File = FaultyFile<D::File>;
    type Reader = D::Reader;

    fn create_directory(&self, directory: &Path) -> io::Result<()> {
        self.faults.run(|| self.disk.create_directory(directory))
    }

    fn names(&self, directory: &Path) -> io::Result<Vec<OsString>> {
        self.faults.run(|| self.disk.names(directory))
    }

    fn create(&self, path: &Path) -> io::Result<Self::File> {
        let file = self.faults.run(|| self.disk.create(path))?;
        Ok(FaultyFile { file, faults: self.faults.clone(), is_full: false })
    }

    fn sync(&self, file: &Self::File) -> io::Result<()> {
        self.faults.run(|| self.disk.sync(&file.file))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.faults.run(|| self.disk.rename(from, to))
    }

    fn sync_directory(&self, directory: &Path) -> io::Result<()> {
        self.faults.run(|| self.disk.sync_directory(directory))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.faults.run(|| self.disk.remove(path))
    }

    fn remove_if_abandoned(&self, path: &Path) -> io::Result<bool> {
        self.faults.run(|| self.disk.remove_if_abandoned(path))
    }

    fn open(&self, path: &Path) -> io::Result<(Self::Reader, u64)> {
        self.disk.open(path)
    }
}

/// One directory in memory.
#[derive(Clone, Default)]
pub(super) struct MemoryDisk(Rc<RefCell<State>>);

#[derive(Clone, Default)]
struct State {
    files: Vec<Content>,
    /// The names as processes see them: indices into `files`.
    names: BTreeMap<OsString, usize>,
    synced_names: BTreeMap<OsString, usize>,
    /// The changes of names since they were last synced.
    unsynced: Vec<Change>,
}

#[derive(Clone, Default)]
struct Content {
    written: Vec<u8>,
    synced: Vec<u8>,
    is_open: bool,
}

#[derive(Clone)]
enum Change {
    Put(OsString, usize),
    Remove(OsString),
    Rename(OsString, OsString, usize),
}

impl Change {
    fn apply(&self, names: &mut BTreeMap<OsString, usize>) {
        match self {
            Change::Put(name, file) => drop(names.insert(name.clone(), *file)),
            Change::Remove(name) => drop(names.remove(name)),
            Change::Rename(from, to, file) => {
                names.remove(from);
                names.insert(to.clone(), *file);
            }
        }
    }
}

impl State {
    fn change(&mut self, change: Change) {
        change.apply(&mut self.names);
        self.unsynced.push(change);
    }

    fn find(&self, path: &Path) -> io::Result<usize> {
        self.names.get(&name(path)).copied().ok_or(ErrorKind::NotFound.into())
    }
}

fn name(path: &Path) -> OsString {
    path.file_name().unwrap().to_owned()
}

impl MemoryDisk {
    /// The process that wrote the files has ended.
    pub(super) fn close_all(&self) {
        self.0.borrow_mut().files.iter_mut().for_each(|file| file.is_open = false);
    }

    /// The disks that a power cut may leave now. Any of the changes of names since they were synced may
    /// survive. Of contents that were not synced, nothing, a part, zeros, or everything may survive.
    pub(super) fn power_cuts(&self) -> Vec<MemoryDisk> {
        let state = self.0.borrow();
        let contents: [fn(&Content) -> Vec<u8>; 4] = [
            |file| file.synced.clone(),
            |file| file.written.clone(),
            |file| match file.written == file.synced {
                true => file.synced.clone(),
                false => file.written[..file.written.len() / 2].to_vec(),
            },
            |file| match file.written == file.synced {
                true => file.synced.clone(),
                false => vec![0; file.written.len()],
            },
        ];
        let mut survivors = Vec::new();
        for survive in 0..1_u32 << state.unsynced.len() {
            let mut names = state.synced_names.clone();
            let changes = state.unsynced.iter().enumerate();
            changes
                .filter(|(bit, _)| survive >> bit & 1 == 1)
                .for_each(|(_, change)| change.apply(&mut names));
            for content in contents {
                let files = state.files.iter().map(|file| {
                    let bytes = content(file);
                    Content { written: bytes.clone(), synced: bytes, is_open: false }
                });
                survivors.push(MemoryDisk(Rc::new(RefCell::new(State {
                    files: files.collect(),
                    names: names.clone(),
                    synced_names: names.clone(),
                    unsynced: Vec::new(),
                }))));
            }
        }
        survivors
    }
}

pub(super) struct MemoryFile {
    disk: MemoryDisk,
    place: usize,
}

impl Write for MemoryFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.disk.0.borrow_mut().files[self.place].written.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        self.disk.0.borrow_mut().files[self.place].is_open = false;
    }
}

impl Disk for MemoryDisk {
    type File = MemoryFile;
    type Reader = Cursor<Vec<u8>>;

    fn create_directory(&self, _directory: &Path) -> io::Result<()> {
        Ok(())
    }

    fn names(&self, _directory: &Path) -> io::Result<Vec<OsString>> {
        Ok(self.0.borrow().names.keys().cloned().collect())
    }

    fn create(&self, path: &Path) -> io::Result<MemoryFile> {
        let mut state = self.0.borrow_mut();
        if state.names.contains_key(&name(path)) {
            return Err(ErrorKind::AlreadyExists.into());
        }
        let place = state.files.len();
        state.files.push(Content { is_open: true, ..Content::default() });
        state.change(Change::Put(name(path), place));
        Ok(MemoryFile { disk: self.clone(), place })
    }

    fn sync(&self, file: &MemoryFile) -> io::Result<()> {
        let content = &mut self.0.borrow_mut().files[file.place];
        content.synced.clone_from(&content.written);
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        let file = state.find(from)?;
        state.change(Change::Rename(name(from), name(to), file));
        Ok(())
    }

    fn sync_directory(&self, _directory: &Path) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        state.synced_names = state.names.clone();
        state.unsynced.clear();
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        state.find(path)?;
        state.change(Change::Remove(name(path)));
        Ok(())
    }

    fn remove_if_abandoned(&self, path: &Path) -> io::Result<bool> {
        let file = self.0.borrow().find(path)?;
        if self.0.borrow().files[file].is_open {
            return Ok(false);
        }
        self.remove(path).map(|()| true)
    }

    fn open(&self, path: &Path) -> io::Result<(Cursor<Vec<u8>>, u64)> {
        let state = self.0.borrow();
        let bytes = state.files[state.find(path)?].written.clone();
        let length = bytes.len() as u64;
        Ok((Cursor::new(bytes), length))
    }
}
