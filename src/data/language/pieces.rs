//! Reads files in pieces, processes them in parallel and delivers the results in order.
//!
//! Memory holds one batch of pieces, two per thread, whatever the size of the files.

use std::{
    io::Read,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use rayon::prelude::*;

use super::DataError;
use super::tokenizer::SplitRule;
use crate::{ProgressObserver, files};

/// Maximum bytes of a text piece.
pub const PIECE_BYTES: usize = 1 << 18;

/// What editors on Windows write before UTF-8 text; it is not part of the text.
pub const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Progress of a pass over files.
pub struct FileProgress<'a> {
    pub observer: &'a dyn ProgressObserver,
    pub activity: &'a str,
    pub bytes_read: Arc<AtomicU64>,
    total_bytes: u64,
}

impl<'a> FileProgress<'a> {
    pub fn new(
        files: &[PathBuf],
        observer: &'a dyn ProgressObserver,
        activity: &'a str,
    ) -> Result<Self, DataError> {
        let sizes = files.iter().map(|file| files::compression(file).map(|(_, bytes)| bytes));
        Ok(Self {
            observer,
            activity,
            bytes_read: Arc::default(),
            total_bytes: sizes.sum::<Result<u64, _>>()?,
        })
    }

    fn report(&self) {
        let read = self.bytes_read.load(Ordering::Relaxed);
        if read < self.total_bytes {
            self.observer.report(self.activity, read, self.total_bytes);
        }
    }

    pub fn finish(&self) {
        self.observer.report(self.activity, self.total_bytes, self.total_bytes);
    }
}

/// Calls `work` on each item from `next`, on any thread, and `take` with the items and their results in order, while no
/// thread works.
pub fn parallel_in_order<I: Sync + Send, T: Send>(
    progress: &FileProgress,
    mut next: impl FnMut() -> Result<Option<I>, DataError>,
    work: impl Fn(&I) -> Result<T, DataError> + Sync,
    mut take: impl FnMut(I, T) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let batch_size = 2 * rayon::current_num_threads().max(1);
    let mut batch: Vec<I> = Vec::with_capacity(batch_size);
    loop {
        let item = next()?;
        let ended = item.is_none();
        batch.extend(item);
        if batch.len() >= batch_size || ended {
            let done: Vec<Result<T, DataError>> = batch.par_iter().map(&work).collect();
            batch.drain(..).zip(done).try_for_each(|(item, done)| take(item, done?))?;
            progress.report();
        }
        if ended {
            progress.finish();
            return Ok(());
        }
    }
}

/// Reads `files` as UTF-8 in pieces that end where the split rule `cut` allows; text without such a place is split
/// every [`PIECE_BYTES`] bytes. Calls `work` with every piece, on any thread, and `take` with the pieces and their
/// results in text order, while no thread works, and with `None` at the end of each file.
pub fn for_each_piece<T: Send>(
    files: &[PathBuf],
    cut: SplitRule,
    (observer, activity): (&dyn ProgressObserver, &str),
    work: impl Fn(&str) -> Result<T, DataError> + Sync,
    mut take: impl FnMut(Option<(String, T)>, &Path) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let progress = FileProgress::new(files, observer, activity)?;
    let mut left = files.iter();
    let mut open: Option<TextPieces> = None;
    let next = || loop {
        let Some(reader) = &mut open else {
            let Some(file) = left.next() else { return Ok(None) };
            open = Some(TextPieces::open(file, cut, &progress.bytes_read)?);
            continue;
        };
        let (piece, file) = (reader.next()?, reader.file);
        if piece.is_none() {
            if reader.offset == 0 {
                return Err(DataError::EmptyFile { file: file.to_owned() });
            }
            open = None;
        }
        return Ok(Some((piece, file)));
    };
    let work = |(piece, _): &(Option<String>, &Path)| piece.as_deref().map(&work).transpose();
    parallel_in_order(&progress, next, work, |(piece, file), done| take(piece.zip(done), file))
}

/// Reads a file in pieces of whole characters.
struct TextPieces<'a> {
    file: &'a Path,
    reader: Box<dyn Read + Send>,
    split_rule: SplitRule,
    /// Bytes read but not returned yet, and how many were returned before them.
    pending: Vec<u8>,
    offset: u64,
    eof: bool,
}

impl<'a> TextPieces<'a> {
    fn open(file: &'a Path, cut: SplitRule, read: &Arc<AtomicU64>) -> Result<Self, DataError> {
        let reader = files::open_counting(file, read.clone())?;
        Ok(Self { file, reader, split_rule: cut, pending: Vec::new(), offset: 0, eof: false })
    }

    fn next(&mut self) -> Result<Option<String>, DataError> {
        if !self.eof {
            let missing = (PIECE_BYTES - self.pending.len().min(PIECE_BYTES)) as u64;
            let got = self.reader.by_ref().take(missing).read_to_end(&mut self.pending);
            self.eof = got.map_err(|error| files::read_error(self.file, error))? < missing as usize;
        }
        if self.offset == 0 && self.pending.starts_with(BYTE_ORDER_MARK) {
            self.pending.drain(..BYTE_ORDER_MARK.len());
            self.offset = BYTE_ORDER_MARK.len() as u64;
        }
        let whole = match str::from_utf8(&self.pending) {
            Ok(_) => self.pending.len(),
            // The end of a piece may split a character; the end of the file may not.
            Err(error) if error.error_len().is_none() && !self.eof => error.valid_up_to(),
            Err(error) => {
                let at = error.valid_up_to();
                let offset = self.offset + at as u64;
                return Err(DataError::InvalidUtf8 {
                    file: self.file.to_owned(),
                    offset,
                    byte: self.pending[at],
                });
            }
        };
        if whole == 0 {
            return Ok(None);
        }
        let rest = self.pending.split_off(whole);
        let text = std::mem::replace(&mut self.pending, rest);
        // Infallible: the bytes up to `whole` were just validated.
        let mut text = String::from_utf8(text).unwrap_or_default();
        if !self.eof {
            let (end, next) = self.split_rule.split_point(&text);
            let mut rest = text.as_bytes()[next..].to_vec();
            rest.append(&mut self.pending);
            self.pending = rest;
            self.offset += next as u64;
            text.truncate(end);
        } else {
            self.offset += text.len() as u64;
        }
        Ok(Some(text))
    }
}

impl SplitRule {
    /// Where the first part of `text` ends and where the second begins: at the last allowed place, or at the end of
    /// `text`. The first part is never empty.
    fn split_point(self, text: &str) -> (usize, usize) {
        let bytes = text.as_bytes();
        let solid = |c: Option<char>| c.is_some_and(|c| !c.is_whitespace());
        let alone = |at: usize| solid(text[..at].chars().next_back()) && solid(text[at + 1..].chars().next());
        let last = |of: u8| memchr::memrchr_iter(of, bytes).find(|&at| alone(at));
        match self {
            SplitRule::Anywhere => None,
            SplitRule::BeforeSpace => {
                last(b' ').map(|at| (at, at)).or_else(|| last(b'\n').map(|at| (at + 1, at + 1)))
            }
            SplitRule::AtSpace => last(b' ').map(|at| (at, at + 1)),
        }
        .unwrap_or((bytes.len(), bytes.len()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::NoProgress;

    fn read(texts: &[&[u8]], cut: SplitRule) -> Result<Vec<Option<String>>, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let files: Vec<PathBuf> = (0..texts.len()).map(|i| folder.path().join(i.to_string())).collect();
        files.iter().zip(texts).for_each(|(file, text)| std::fs::write(file, text).unwrap());
        let mut all = Vec::new();
        for_each_piece(
            &files,
            cut,
            (&NoProgress, ""),
            |_| Ok(()),
            |piece, _| {
                all.push(piece.map(|(text, ())| text));
                Ok(())
            },
        )?;
        Ok(all)
    }

    #[test]
    fn places_are_between_words() {
        for (text, before, at) in [
            ("one two three", (7, 7), (7, 8)),
            ("one two  three", (3, 3), (3, 4)),
            ("one\ntwo", (4, 4), (7, 7)),
            ("one\n\ntwo", (8, 8), (8, 8)),
            (" one ", (5, 5), (5, 5)),
            ("中文\u{3000}中 文", ("中文\u{3000}中".len(), "中文\u{3000}中".len()), (12, 13)),
        ] {
            assert_eq!(
                (SplitRule::BeforeSpace.split_point(text), SplitRule::AtSpace.split_point(text)),
                (before, at),
                "{text:?}"
            );
            assert_eq!(SplitRule::Anywhere.split_point(text), (text.len(), text.len()));
        }
    }

    #[test]
    fn pieces_make_the_text_and_characters_stay_whole() {
        // Three-byte characters, so that no piece ends on a character boundary.
        let long: String = (0..400_000u32).map(|i| if i % 50 == 7 { ' ' } else { '\u{4e2d}' }).collect();
        for cut in [SplitRule::Anywhere, SplitRule::BeforeSpace, SplitRule::AtSpace] {
            let pieces = read(&[long.as_bytes(), b"second"], cut).unwrap();
            assert!(pieces.len() > 5 && pieces.iter().flatten().all(|piece| piece.len() <= PIECE_BYTES));
            let files: Vec<&[Option<String>]> = pieces.split(Option::is_none).collect();
            let joined = files[0].iter().flatten().map(String::as_str).collect::<Vec<_>>();
            assert_eq!(joined.join(if cut == SplitRule::AtSpace { " " } else { "" }), long, "{cut:?}");
            assert_eq!(files[1], [Some("second".into())]);
        }
    }

    #[test]
    fn a_byte_order_mark_is_no_character() {
        let marked = "\u{feff}aö\u{feff}b";
        assert_eq!(
            read(&[marked.as_bytes()], SplitRule::Anywhere).unwrap(),
            [Some("aö\u{feff}b".into()), None]
        );
        let error = read(&[b"\xef\xbb\xbfa\xff"], SplitRule::Anywhere).unwrap_err();
        assert!(matches!(error, DataError::InvalidUtf8 { offset: 4, byte: 0xff, .. }), "{error}");
    }

    #[test]
    fn what_is_not_text_is_refused_with_its_place() {
        let bad = [vec![b'a'; 700_000], vec![0xff, b'b']].concat();
        let error = read(&[&bad], SplitRule::BeforeSpace).unwrap_err();
        assert!(matches!(error, DataError::InvalidUtf8 { offset: 700_000, byte: 0xff, .. }), "{error}");
        let cut = read(&["aö".as_bytes().split_at(2).0], SplitRule::Anywhere).unwrap_err();
        assert!(matches!(cut, DataError::InvalidUtf8 { offset: 1, byte: 0xc3, .. }), "{cut}");
        assert!(matches!(read(&[b"a", b""], SplitRule::Anywhere).unwrap_err(), DataError::EmptyFile { .. }));
        // A compressed empty file counts as empty too.
        let packed = zstd::encode_all(&b""[..], 1).unwrap();
        assert!(matches!(read(&[&packed], SplitRule::Anywhere).unwrap_err(), DataError::EmptyFile { .. }));
    }

    #[test]
    fn progress_ends_at_all_of_it() {
        #[derive(Default)]
        struct RecordingObserver(Mutex<Vec<(u64, u64)>>);
        impl ProgressObserver for RecordingObserver {
            fn report(&self, _: &str, done: u64, all: u64) {
                self.0.lock().unwrap().push((done, all));
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a");
        std::fs::write(&file, vec![b'x'; 5 << 20]).unwrap();
        let seen = RecordingObserver::default();
        for_each_piece(
            std::slice::from_ref(&file),
            SplitRule::Anywhere,
            (&seen, "reading"),
            |_| Ok(()),
            |_, _| Ok(()),
        )
        .unwrap();
        let seen = seen.0.into_inner().unwrap();
        let all = std::fs::metadata(&file).unwrap().len();
        // How many there are depends on the speed of the machine.
        assert!(seen.iter().all(|s| s.1 == all) && seen.is_sorted());
        assert_eq!(*seen.last().unwrap(), (all, all));
    }
}
