//! The channel between the launcher and the keeper of its ranks. A message is a list of fields, with
//! descriptors.

use std::{
    io::{self, IoSlice, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    net::Shutdown,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

use drumline::named;
use rustix::{
    cmsg_space,
    io::retry_on_intr,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    },
};

/// More than the kernel takes for the arguments and variables of a program.
const BYTES_MAX: u32 = 64 * 1024 * 1024;

/// The most descriptors in a message.
const DESCRIPTORS_MAX: usize = 3;

/// One end of the channel. Both ends are processes of this program.
#[derive(Debug)]
pub(crate) struct Channel(UnixStream);

/// A message; `None` if the other end has closed the channel.
pub(crate) type Message = Option<(Vec<Vec<u8>>, Vec<OwnedFd>)>;

impl Channel {
    pub(crate) fn over(stream: UnixStream) -> Channel {
        Channel(stream)
    }

    /// Sends one message. A field may not contain a zero byte.
    pub(crate) fn send(
        &self,
        fields: &[impl AsRef<[u8]>],
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let mut bytes = vec![0; size_of::<u32>()];
        for field in fields {
            if field.as_ref().contains(&0) {
                let field = String::from_utf8_lossy(field.as_ref());
                let what = format!("{field:?} has a zero byte");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
            }
            bytes.extend_from_slice(field.as_ref());
            bytes.push(0);
        }
        let length = u32::try_from(bytes.len() - size_of::<u32>());
        let length = length.ok().filter(|&length| length <= BYTES_MAX);
        let length = length.ok_or_else(|| io::Error::from(io::ErrorKind::ArgumentListTooLong))?;
        bytes[..size_of::<u32>()].copy_from_slice(&length.to_ne_bytes());

        // The descriptors travel with the first byte.
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::Error::other("too many descriptors"));
        }
        let sent = retry_on_intr(|| {
            sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)
        })
        .map_err(named("sendmsg"))?;
        (&self.0).write_all(&bytes[sent..])
    }

    /// Waits for one message.
    pub(crate) fn receive(&self) -> io::Result<Message> {
        let mut length = [0; size_of::<u32>()];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
        let first = retry_on_intr(|| {
            recvmsg(&self.0, &mut [IoSliceMut::new(&mut length)], &mut control, flags)
        });
        let received = match first {
            Ok(answer) => answer.bytes,
            Err(rustix::io::Errno::CONNRESET) => 0,
            Err(error) => return Err(named("recvmsg")(error)),
        };
        if received == 0 {
            return Ok(None);
        }
        let mut descriptors = Vec::new();
        for item in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = item {
                descriptors.extend(rights);
            }
        }
        (&self.0).read_exact(&mut length[received..])?;
        let length = u32::from_ne_bytes(length);
        if length > BYTES_MAX {
            return Err(io::Error::other("a message is too long"));
        }
        let mut bytes = vec![0; length as usize];
        (&self.0).read_exact(&mut bytes)?;
        let mut fields: Vec<_> = bytes.split(|&byte| byte == 0).map(<[u8]>::to_vec).collect();
        fields.pop(); // nothing follows the last zero byte
        Ok(Some((fields, descriptors)))
    }

    /// A message that the other end takes or sends no part of for so long is an error.
    pub(crate) fn limit(&self, patience: Duration) -> io::Result<()> {
        self.0.set_write_timeout(Some(patience))?;
        self.0.set_read_timeout(Some(patience))
    }

    /// Tells the other end that nothing more will come.
    pub(crate) fn hang_up(&self) {
        let _ = self.0.shutdown(Shutdown::Write);
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn pair() -> (Channel, Channel) {
        let (one, other) = UnixStream::pair().unwrap();
        (Channel::over(one), Channel::over(other))
    }

    #[test]
    fn fields_and_descriptors_arrive_in_order_then_the_end() {
        let (one, other) = pair();
        let (mut read, write) = io::pipe().unwrap();
        let long = vec![0xff; 3_000_000]; // longer than the buffer of a socket
        let sender = thread::spawn(move || {
            one.send(&["a", "", "c"], &[write.as_fd()]).unwrap();
            one.send(&[&long], &[]).unwrap();
            one.send(&[""; 0], &[]).unwrap();
        });
        let (fields, mut descriptors) = other.receive().unwrap().unwrap();
        assert_eq!((fields, descriptors.len()), (vec![b"a".to_vec(), vec![], b"c".to_vec()], 1));
        let (fields, none) = other.receive().unwrap().unwrap();
        assert_eq!((fields.len(), fields[0].len(), none.len()), (1, 3_000_000, 0));
        assert_eq!(other.receive().unwrap().unwrap().0, Vec::<Vec<u8>>::new());
        sender.join().unwrap();
        assert!(other.receive().unwrap().is_none());

        let mut pipe = io::PipeWriter::from(descriptors.remove(0));
        pipe.write_all(b"x").unwrap();
        drop(pipe);
        let mut text = String::new();
        read.read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
    }

    #[test]
    fn a_zero_byte_is_refused_and_a_torn_message_is_an_error() {
        let (one, other) = pair();
        assert_eq!(one.send(&["a\0b"], &[]).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        (&one.0).write_all(&[9, 0, 0, 0, b'x']).unwrap();
        drop(one);
        assert!(other.receive().is_err());
        let (one, other) = pair();
        (&one.0).write_all(&[9, 0]).unwrap();
        drop(one);
        assert!(other.receive().is_err());
    }
}
