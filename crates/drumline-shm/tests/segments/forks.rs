//! Sockets that a fork does not share.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    os::{fd::AsRawFd as _, unix::net::UnixStream},
    thread,
    time::{Duration, Instant},
};

use drumline_shm::{Unforked, fork_idle};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Signal, WaitOptions, kill_process, waitpid};

/// Ends a fork when the test does.
struct Fork(rustix::process::Pid);

impl Fork {
    fn new() -> Fork {
        Fork(fork_idle(60).unwrap())
    }
}

impl Drop for Fork {
    fn drop(&mut self) {
        kill_process(self.0, Signal::KILL).unwrap();
        waitpid(Some(self.0), WaitOptions::empty()).unwrap();
    }
}

fn pair() -> (Unforked<UnixStream>, UnixStream) {
    let mut other = None;
    let ours = Unforked::open(|| {
        let (ours, theirs) = UnixStream::pair()?;
        theirs.set_read_timeout(Some(Duration::from_secs(20)))?;
        other = Some(theirs);
        Ok(ours)
    });
    (ours.unwrap(), other.unwrap())
}

#[test]
fn a_connection_ends_with_the_process_that_opened_it_whatever_it_has_forked() {
    let (mut ours, mut theirs) = pair();
    let fork = Fork::new();
    // Still whole, in both directions.
    ours.write_all(b"to").unwrap();
    theirs.write_all(b"fro").unwrap();
    let mut bytes = [0; 3];
    theirs.read_exact(&mut bytes[..2]).unwrap();
    ours.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"fro");
    drop(ours);
    assert_eq!(theirs.read(&mut bytes).unwrap(), 0);
    drop(fork);
}

/// What the fork has under the number stays taken by what is good for nothing.
#[test]
fn a_fork_has_a_dead_socket_under_the_same_number() {
    let (ours, _theirs) = pair();
    let fork = Fork::new();
    let link = |process: &str| {
        std::fs::read_link(format!("/proc/{process}/fd/{}", ours.as_raw_fd())).unwrap()
    };
    let child = fork.0.as_raw_nonzero().to_string();
    // The fork returns to its parent before the child has got that far.
    let until = Instant::now() + Duration::from_secs(20);
    while link("self") == link(&child) {
        assert!(Instant::now() < until, "the fork shares the socket");
        thread::sleep(Duration::from_millis(1));
    }
    assert!(link(&child).to_string_lossy().starts_with("socket:"));
}

/// The number of a socket that was closed goes to another descriptor, which a fork does share.
#[test]
fn a_closed_socket_leaves_its_number_to_others() {
    // So high that no other test gets it.
    const NUMBER: i32 = 700;
    let (socket, mut theirs) = UnixStream::pair().unwrap();
    let copy = || {
        let copy = fcntl_dupfd_cloexec(&socket, NUMBER).unwrap();
        assert_eq!(copy.as_raw_fd(), NUMBER);
        copy
    };
    drop(Unforked::open(|| Ok(copy())).unwrap());
    let shared = copy();
    let fork = Fork::new();
    drop((shared, socket));
    theirs.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let kind = theirs.read(&mut [0]).unwrap_err().kind();
    assert_eq!(kind, ErrorKind::WouldBlock, "the fork has closed what is not ours");
    drop(fork);
}

/// Forks come between opening and closing, never into the midst of it.
#[test]
fn forks_and_sockets_of_other_threads_do_not_disturb_each_other() {
    thread::scope(|scope| {
        let sockets = (0..2).map(|_| {
            scope.spawn(|| {
                for _ in 0..200 {
                    let (ours, mut theirs) = pair();
                    drop(ours);
                    // Whatever was forked meanwhile holds it no longer than a moment.
                    assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
                }
            })
        });
        let sockets: Vec<_> = sockets.collect();
        let forks: Vec<Fork> = (0..30).map(|_| Fork::new()).collect();
        sockets.into_iter().for_each(|thread| thread.join().unwrap());
        drop(forks);
    });
}
