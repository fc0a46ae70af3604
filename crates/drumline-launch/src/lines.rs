//! Cuts a stream of bytes into lines.

/// A part of a stream, without its terminator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Piece<'a> {
    /// A line, or the last part of a long one.
    Line(&'a [u8]),
    /// The next [`PART_MAX`] bytes of a line that goes on.
    Part(&'a [u8]),
    /// A line that ends with `\r`: the state of a progress bar. Later output overwrites it.
    Progress(&'a [u8]),
}

/// The most bytes of a line that are held back until its end arrives.
pub(crate) const PART_MAX: usize = 64 * 1024;

/// Cuts a stream into [`Piece`]s, wherever the boundaries of its reads are.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    line: Vec<u8>,
    /// Whether the line ended with `\r` and was passed on as progress. If `\n` follows, the program ends its
    /// lines with `\r\n`, and this was a line.
    after_return: bool,
}

impl Lines {
    /// Passes all pieces that `bytes` complete to `emit`.
    pub(crate) fn push(&mut self, mut bytes: &[u8], mut emit: impl FnMut(Piece<'_>)) {
        while let Some(&next) = bytes.first() {
            if std::mem::take(&mut self.after_return) && next != b'\n' {
                self.line.clear();
            }
            let room = PART_MAX - self.line.len();
            let window = &bytes[..bytes.len().min(room)];
            let end = window.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            self.line.extend_from_slice(&window[..end.unwrap_or(window.len())]);
            bytes = &bytes[end.map_or(window.len(), |end| end + 1)..];
            match end.map(|end| window[end]) {
                Some(b'\n') => {
                    emit(Piece::Line(&self.line));
                    self.line.clear();
                }
                Some(_) => {
                    if !self.line.is_empty() {
                        emit(Piece::Progress(&self.line));
                    }
                    self.after_return = true;
                }
                None if self.line.len() == PART_MAX => {
                    emit(Piece::Part(&self.line));
                    self.line.clear();
                }
                None => {}
            }
        }
    }

    /// The beginning of a line that has no end yet.
    pub(crate) fn unfinished(&self) -> Option<&[u8]> {
        (!self.line.is_empty() && !self.after_return).then_some(&self.line[..])
    }

    /// Passes a last line without `\n` to `emit`.
    pub(crate) fn finish(self, emit: impl FnOnce(Piece<'_>)) {
        if !self.line.is_empty() && !self.after_return {
            emit(Piece::Line(&self.line));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pieces<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> Vec<(char, Vec<u8>)> {
        let mut pieces = Vec::new();
        let mut collect = |piece: Piece<'_>| {
            pieces.push(match piece {
                Piece::Line(text) => ('L', text.to_vec()),
                Piece::Part(text) => ('P', text.to_vec()),
                Piece::Progress(text) => ('R', text.to_vec()),
            });
        };
        let mut lines = Lines::default();
        chunks.into_iter().for_each(|chunk| lines.push(chunk, &mut collect));
        lines.finish(&mut collect);
        pieces
    }

    fn of(text: &str) -> String {
        let pieces = pieces([text.as_bytes()]);
        let text = |bytes| String::from_utf8(bytes).unwrap();
        pieces.into_iter().map(|(kind, bytes)| format!("{kind}({}) ", text(bytes))).collect()
    }

    #[test]
    fn lines_progress_and_ends() {
        assert_eq!(of("a\n\nb"), "L(a) L() L(b) ");
        assert_eq!(of("1%\r2%\rdone\n"), "R(1%) R(2%) L(done) ");
        assert_eq!(of("\r1%\r2%\n"), "R(1%) L(2%) ");
        assert_eq!(of("dos\r\nline\r\n"), "R(dos) L(dos) R(line) L(line) ");
        assert_eq!(of("99%\r"), "R(99%) ");
    }

    #[test]
    fn long_lines_come_in_parts() {
        let long = vec![b'x'; 2 * PART_MAX + 3];
        let sizes: Vec<_> = pieces([&long[..]]).into_iter().map(|(k, t)| (k, t.len())).collect();
        assert_eq!(sizes, [('P', PART_MAX), ('P', PART_MAX), ('L', 3)]);

        let exact = [vec![b'x'; PART_MAX], b"\ny\n".to_vec()].concat();
        let sizes: Vec<_> = pieces([&exact[..]]).into_iter().map(|(k, t)| (k, t.len())).collect();
        assert_eq!(sizes, [('P', PART_MAX), ('L', 0), ('L', 1)]);
    }

    proptest! {
        #[test]
        fn chopping_changes_nothing_and_no_byte_is_lost(
            chunks in prop::collection::vec(
                prop::collection::vec(prop::sample::select(b"ab\n\r\xff".to_vec()), 0..8), 0..12)
        ) {
            let whole = chunks.concat();
            let pieces = pieces(chunks.iter().map(Vec::as_slice));
            prop_assert_eq!(&pieces, &super::tests::pieces([&whole[..]]));

            let without_returns: Vec<u8> = {
                let text = String::from_utf8_lossy(&whole).replace("\r\n", "\n");
                let lines = text.split_inclusive('\n');
                let kept = lines.map(|line| line.rsplit('\r').next().unwrap_or(line).to_owned());
                kept.collect::<String>().into_bytes()
            };
            let mut printed: Vec<u8> = Vec::new();
            for (_, text) in pieces.iter().filter(|(kind, _)| *kind == 'L') {
                printed.extend(String::from_utf8_lossy(text).bytes());
                printed.push(b'\n');
            }
            if !without_returns.is_empty() && !without_returns.ends_with(b"\n") {
                printed.pop();
            }
            prop_assert_eq!(printed, without_returns);
        }
    }
}
