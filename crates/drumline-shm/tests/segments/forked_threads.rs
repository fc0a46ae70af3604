//! Handles of threads that a fork inherits.

use std::{sync::mpsc, thread};

use drumline_shm::OwnThread;

#[test]
fn a_forked_process_leaves_inherited_threads_alone() {
    let (stop, stopped) = mpsc::channel::<()>();
    let inherited = OwnThread::new(thread::spawn(move || stopped.recv().is_err()));
    let also_inherited = OwnThread::new(thread::spawn(|| 7));
    // SAFETY: the C library makes its allocator usable in a fork, and the child calls nothing else that a thread of the
    // parent may hold. It ends by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // These threads get the memory of those that the child lacks.
        let new: Vec<_> = (0..4).map(|at| OwnThread::new(thread::spawn(move || at))).collect();
        let is_elsewhere = !inherited.is_here() && inherited.join().is_none();
        drop(also_inherited);
        let joined = new.into_iter().map(|it| it.join().map(Result::unwrap)).eq((0..4).map(Some));
        // SAFETY: `_exit` ends the child at once and runs none of the parent's exit handlers.
        unsafe { libc::_exit(if is_elsewhere && joined { 0 } else { 1 }) };
    }
    let pid = rustix::process::Pid::from_raw(child).expect("fork");
    let (_, status) = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty())
        .unwrap()
        .unwrap();
    assert_eq!(status.exit_status(), Some(0));
    drop(stop);
    assert!(inherited.is_here());
    assert_eq!(inherited.join().map(Result::unwrap), Some(true));
    assert_eq!(also_inherited.join().map(Result::unwrap), Some(7));
}
