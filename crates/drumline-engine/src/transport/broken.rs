//! How a stream ends.

use std::io;

use drumline_schedule::step::Rank;

use crate::error::Cause;

/// Why a stream carries no more.
#[derive(Debug)]
pub(crate) enum Broken {
    /// The peer has closed it.
    Closed,
    Failed(io::Error),
}

impl Broken {
    /// Whether bytes arrived that the peer did not send. In that case the failure cannot be explained by
    /// anything that the peer says.
    pub(crate) fn is_forged(&self) -> bool {
        matches!(self, Broken::Failed(error) if is_forged(error))
    }

    /// The cause of a failure that the peer's control connection does not explain.
    pub(crate) fn cause(&self, peer: Rank) -> Cause {
        match self {
            Broken::Failed(error) if is_silence(error) => Cause::HostSilent { peer },
            Broken::Failed(error) => Cause::Disconnected { peer, problem: error.to_string() },
            Broken::Closed => Cause::Disconnected { peer, problem: "it was closed".to_owned() },
        }
    }
}

/// How many bytes moved. `None`: no byte can move now; if the stream is broken, `broken` says why.
pub(crate) fn outcome(result: io::Result<usize>, broken: &mut Option<Broken>) -> Option<usize> {
    match result {
        Ok(0) => {
            *broken = Some(Broken::Closed);
            None
        }
        Ok(bytes) => Some(bytes),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Some(0),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
        Err(error) => {
            *broken = Some(Broken::Failed(error));
            None
        }
    }
}

/// Whether bytes arrived that the peer did not send.
pub(crate) fn is_forged(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData
}

/// Whether a peer's host has said nothing for too long, or cannot be reached.
pub fn is_silence(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::TimedOut
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
    )
}
