//! TensorBoard event files, encoded by hand: TFRecord frames around protobuf `Event`s.
//!
//! A frame is the payload's length (u64), its masked CRC-32C, the payload, and the payload's masked CRC-32C,
//! little-endian. A resumed run opens a new file that starts with a session start at the first repeated step;
//! TensorBoard then discards what it had from there on.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::confusion_image;
use crate::events::Sink;
use crate::events::event::{Event, EventRecord};
use crate::job::{Job, job_values};
use crate::metrics::detail::TaskDetail;
use crate::metrics::histogram::Histogram;
use crate::train::evaluation_file::{EvaluationFile, StepDetail};

/// Scalars, images and histograms of a run, in a folder of event files.
pub struct TensorBoard {
    folder: PathBuf,
    /// Opened by the first record, whose time names the file.
    file: Option<File>,
    /// The job by key, as JSON; empty without [`with_hparams`](Self::with_hparams).
    hparams: Vec<(String, Value)>,
    /// `evaluation.json` of the run, which has the confusion matrix of the best evaluation.
    evaluation: Option<PathBuf>,
}

impl TensorBoard {
    /// Writes under `folder`, created if absent, beside the files of earlier sessions.
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), file: None, hparams: Vec::new(), evaluation: None }
    }

    /// Also writes the job for the hparams plugin, which compares runs by it.
    pub fn with_hparams(mut self, job: &Job) -> Self {
        let parsed = |(key, text): (String, String)| {
            let value = serde_json::from_str(&text).unwrap_or(Value::String(text));
            (key, value)
        };
        self.hparams = job_values(&job.to_json()).into_iter().map(parsed).collect();
        self
    }

    /// Also writes the confusion matrix of each evaluation that is the best so far, read from this file.
    pub fn read_evaluations(&mut self, file: PathBuf) {
        self.evaluation = Some(file);
    }

    /// The confusion matrix of the best evaluation, if it is that of `step` and has one.
    fn confusion(&self, t: f64, step: u64) -> io::Result<Option<Vec<u8>>> {
        let best = self.evaluation.as_ref().and_then(|file| EvaluationFile::read(file)?.best);
        let Some(StepDetail { detail: TaskDetail::Classification(detail), .. }) =
            best.filter(|best| best.step == step)
        else {
            return Ok(None);
        };
        detail.confusion.map(|matrix| image(t, step, "valid/confusion", &matrix)).transpose()
    }

    fn file(&mut self, t: f64) -> io::Result<&mut File> {
        match self.file {
            Some(ref mut file) => Ok(file),
            None => {
                fs::create_dir_all(&self.folder)?;
                // TensorBoard reads files in the order of their names: each new name must sort after the last.
                let stamps = fs::read_dir(&self.folder)?.filter_map(|entry| {
                    entry.ok()?.file_name().to_str()?.split('.').nth(3)?.parse::<u64>().ok()
                });
                let stamp = stamps.map(|last| last + 1).max().unwrap_or(0).max(t as u64);
                let path = self.folder.join(format!("events.out.tfevents.{stamp:010}.trainer"));
                let mut file = File::options().write(true).create_new(true).open(path)?;
                let version = encode(|m| m.double(1, t).bytes(3, b"brain.Event:2"));
                file.write_all(&frame(&version))?;
                Ok(self.file.insert(file))
            }
        }
    }
}

impl Sink for TensorBoard {
    fn name(&self) -> String {
        self.folder.display().to_string()
    }

    fn record(&mut self, record: &EventRecord) -> io::Result<()> {
        let payload = match &record.event {
            Event::Started { .. } if !self.hparams.is_empty() => hparams_start(record.t, &self.hparams),
            Event::Finished { .. } if !self.hparams.is_empty() => hparams_end(record.t, SUCCESS),
            Event::Diverged { .. } | Event::Failed { .. } if !self.hparams.is_empty() => {
                hparams_end(record.t, FAILURE)
            }
            Event::Resumed { step, .. } => {
                const START: u64 = 1;
                let log = encode(|m| m.int(1, START));
                encode(|m| m.double(1, record.t).int(2, step + 1).bytes(7, &log))
            }
            Event::Step { step, loss, lr, grad_norm, step_s, data_wait_s, ram_bytes, vram_bytes, .. } => {
                scalars(
                    record.t,
                    *step,
                    &[
                        ("train/loss", *loss),
                        ("train/lr", *lr),
                        ("train/grad_norm", *grad_norm),
                        ("time/step_s", *step_s),
                        ("time/data_wait_s", *data_wait_s),
                        ("memory/ram_bytes", *ram_bytes as f64),
                        ("memory/vram_bytes", *vram_bytes as f64),
                    ],
                )
            }
            Event::Eval { step, metrics, .. } => {
                let tags: Vec<(String, f64)> =
                    // The step events have the training loss.
                    metrics
                        .iter()
                        .filter(|(name, _)| *name != "train.loss")
                        .map(|(name, value)| (name.replacen('.', "/", 1), *value))
                        .collect();
                let tags: Vec<(&str, f64)> = tags.iter().map(|(tag, value)| (tag.as_str(), *value)).collect();
                scalars(record.t, *step, &tags)
            }
            Event::Pruned { step, sparsity, .. } => {
                scalars(record.t, *step, &[("prune/sparsity", *sparsity)])
            }
            Event::Best { step, .. } => match self.confusion(record.t, *step)? {
                Some(payload) => payload,
                None => return Ok(()),
            },
            _ => return Ok(()),
        };
        self.file(record.t)?.write_all(&frame(&payload))
    }

    fn histogram(&mut self, t: f64, step: u64, name: &str, histogram: &Histogram) -> io::Result<()> {
        let payload = histogram_event(t, step, &format!("weights/{name}"), histogram);
        self.file(t)?.write_all(&frame(&payload))
    }
}

/// An `Event` with a `Summary` of simple values.
fn scalars(t: f64, step: u64, values: &[(&str, f64)]) -> Vec<u8> {
    let summary = encode(|m| {
        values.iter().fold(m, |m, (tag, value)| {
            m.bytes(1, &encode(|m| m.bytes(1, tag.as_bytes()).float(2, *value as f32)))
        })
    });
    encode(|m| m.double(1, t).int(2, step).bytes(5, &summary))
}

/// An `Event` with a `Summary` of one image.
fn image(t: f64, step: u64, tag: &str, matrix: &[Vec<u64>]) -> io::Result<Vec<u8>> {
    const GRAYSCALE: u64 = 1;
    let (png, size) = confusion_image::png(matrix)?;
    let size = u64::from(size);
    let image = encode(|m| m.int(1, size).int(2, size).int(3, GRAYSCALE).bytes(4, &png));
    let value = encode(|m| m.bytes(1, tag.as_bytes()).bytes(4, &image));
    Ok(encode(|m| m.double(1, t).int(2, step).bytes(5, &encode(|m| m.bytes(1, &value)))))
}

/// An `Event` with a `Summary` of one `HistogramProto`.
fn histogram_event(t: f64, step: u64, tag: &str, histogram: &Histogram) -> Vec<u8> {
    let packed =
        |values: &mut dyn Iterator<Item = f64>| -> Vec<u8> { values.flat_map(f64::to_le_bytes).collect() };
    let limits = packed(&mut histogram.limits.iter().copied());
    let counts = packed(&mut histogram.counts.iter().map(|count| *count as f64));
    let Histogram { min, max, count, sum, sum_squares, .. } = *histogram;
    let proto = encode(|m| {
        let m = m.double(1, min).double(2, max).double(3, count as f64).double(4, sum).double(5, sum_squares);
        m.bytes(6, &limits).bytes(7, &counts)
    });
    let value = encode(|m| m.bytes(1, tag.as_bytes()).bytes(5, &proto));
    encode(|m| m.double(1, t).int(2, step).bytes(5, &encode(|m| m.bytes(1, &value))))
}

/// How a session of the hparams plugin ended.
const SUCCESS: u64 = 1;
const FAILURE: u64 = 2;

/// The hyperparameters of a session, as the hparams plugin reads them. Without a group: sessions of one group count as
/// repetitions of the same settings.
fn hparams_start(t: f64, hparams: &[(String, Value)]) -> Vec<u8> {
    let start = encode(|m| {
        let m = hparams.iter().fold(m, |m, (key, value)| {
            m.bytes(1, &encode(|m| m.bytes(1, key.as_bytes()).bytes(2, &hparam(value))))
        });
        m.double(5, t)
    });
    hparams_event(t, "_hparams_/session_start_info", &encode(|m| m.int(1, 0).bytes(3, &start)))
}

fn hparams_end(t: f64, status: u64) -> Vec<u8> {
    let end = encode(|m| m.int(1, status).double(2, t));
    hparams_event(t, "_hparams_/session_end_info", &encode(|m| m.int(1, 0).bytes(4, &end)))
}

/// A `google.protobuf.Value`.
fn hparam(value: &Value) -> Vec<u8> {
    encode(|m| match value {
        Value::Number(number) => m.double(2, number.as_f64().unwrap_or(f64::NAN)),
        Value::Bool(on) => m.int(4, u64::from(*on)),
        Value::String(text) => m.bytes(3, text.as_bytes()),
        other => m.bytes(3, other.to_string().as_bytes()),
    })
}

/// An `Event` whose one value has only metadata, for the hparams plugin; its tensor is an empty list of floats.
fn hparams_event(t: f64, tag: &str, content: &[u8]) -> Vec<u8> {
    const FLOAT: u64 = 1;
    let tensor = encode(|m| m.int(1, FLOAT).bytes(2, &encode(|m| m.bytes(2, &[]))));
    let plugin = encode(|m| m.bytes(1, b"hparams").bytes(2, content));
    let metadata = encode(|m| m.bytes(1, &plugin));
    let value = encode(|m| m.bytes(1, tag.as_bytes()).bytes(8, &tensor).bytes(9, &metadata));
    encode(|m| m.double(1, t).int(2, 0).bytes(5, &encode(|m| m.bytes(1, &value))))
}

fn masked_crc(bytes: &[u8]) -> [u8; 4] {
    let crc = crc32c::crc32c(bytes);
    crc.rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

fn frame(payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u64).to_le_bytes();
    [&length[..], &masked_crc(&length), payload, &masked_crc(payload)].concat()
}

/// The part of the protobuf wire format that these messages need.
struct ProtoMessage(Vec<u8>);

fn encode(build: impl FnOnce(&mut ProtoMessage) -> &mut ProtoMessage) -> Vec<u8> {
    let mut message = ProtoMessage(Vec::new());
    build(&mut message);
    message.0
}

impl ProtoMessage {
    fn varint(&mut self, mut n: u64) -> &mut Self {
        while n >= 0x80 {
            self.0.push(n as u8 | 0x80);
            n >>= 7;
        }
        self.0.push(n as u8);
        self
    }

    fn key(&mut self, field: u64, wire: u64) -> &mut Self {
        self.varint(field << 3 | wire)
    }

    fn int(&mut self, field: u64, n: u64) -> &mut Self {
        self.key(field, 0).varint(n)
    }

    fn double(&mut self, field: u64, x: f64) -> &mut Self {
        let m = self.key(field, 1);
        m.0.extend(x.to_le_bytes());
        m
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) -> &mut Self {
        let m = self.key(field, 2).varint(bytes.len() as u64);
        m.0.extend(bytes);
        m
    }

    fn float(&mut self, field: u64, x: f32) -> &mut Self {
        let m = self.key(field, 5);
        m.0.extend(x.to_le_bytes());
        m
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixtures;

    /// The payloads of an event file; panics on a wrong length or checksum.
    fn payloads(file: &Path) -> Vec<Vec<u8>> {
        let bytes = fs::read(file).unwrap();
        let (mut rest, mut out) = (&bytes[..], Vec::new());
        while !rest.is_empty() {
            let (length, after) = rest.split_at(8);
            let (crc, after) = after.split_at(4);
            assert_eq!(crc, masked_crc(length));
            let (payload, after) = after.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
            let (crc, after) = after.split_at(4);
            assert_eq!(crc, masked_crc(payload));
            out.push(payload.to_vec());
            rest = after;
        }
        out
    }

    fn files(folder: &Path) -> Vec<PathBuf> {
        let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    }

    /// From RFC 3720, B.4: the CRC-32C of 32 zero bytes is 0x8a9136aa, here masked.
    #[test]
    fn checksums_are_masked_crc32c() {
        let masked = 0x8a91_36aa_u32.rotate_right(15).wrapping_add(0xa282_ead8);
        assert_eq!(masked_crc(&[0; 32]), masked.to_le_bytes());
    }

    #[test]
    fn a_scalar_is_encoded_to_the_byte() {
        let expected = [
            &[0x09][..],
            &1.5f64.to_le_bytes(),
            &[0x10, 0xac, 0x02], // step 300
            &[0x2a, 12, 0x0a, 10, 0x0a, 3, b'a', b'/', b'b', 0x15],
            &0.25f32.to_le_bytes(),
        ]
        .concat();
        assert_eq!(scalars(1.5, 300, &[("a/b", 0.25)]), expected);
    }

    #[test]
    fn a_hyperparameter_is_encoded_to_the_byte() {
        let start = hparams_start(2.0, &[("a".into(), Value::Bool(true))]);
        let value = [0x0a, 7, 0x0a, 1, b'a', 0x12, 2, 0x20, 1];
        let start_info = [&value[..], &[0x29], &2f64.to_le_bytes()].concat();
        let content = [&[0x08, 0, 0x1a, start_info.len() as u8], &start_info[..]].concat();
        assert!(start.windows(content.len()).any(|part| part == content), "{start:?}");
        assert_eq!(hparam(&serde_json::json!([8, 4])), [&[0x1a, 5][..], b"[8,4]"].concat());
        assert_eq!(hparam(&0.5.into()), [&[0x11][..], &0.5f64.to_le_bytes()].concat());
    }

    #[test]
    fn a_histogram_is_encoded_to_the_byte() {
        let histogram = Histogram {
            min: -1.0,
            max: 1.0,
            count: 3,
            sum: 0.5,
            sum_squares: 2.25,
            limits: vec![0.0, 1.0],
            counts: vec![1, 2],
        };
        let doubles = |values: &[f64]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let numbers = [(0x09, -1.0), (0x11, 1.0), (0x19, 3.0), (0x21, 0.5), (0x29, 2.25)];
        let numbers = numbers.map(|(key, x): (u8, f64)| [&[key][..], &x.to_le_bytes()].concat()).concat();
        let lists = [&[0x32, 16][..], &doubles(&[0.0, 1.0]), &[0x3a, 16], &doubles(&[1.0, 2.0])].concat();
        let value = [&[0x0a, 1, b'w', 0x2a, 81][..], &numbers, &lists].concat();
        let event = histogram_event(1.5, 7, "w", &histogram);
        assert!(event.ends_with(&[&[0x2a, 88, 0x0a, 86][..], &value].concat()), "{event:?}");
    }

    #[test]
    fn a_resumed_run_opens_a_later_file_that_purges_what_is_repeated() {
        let folder = tempfile::tempdir().unwrap();
        let mut first = TensorBoard::new(folder.path());
        for record in [fixtures::started(7.0), fixtures::step(7.1, 1), fixtures::eval(7.2, 1, 0.5)] {
            first.record(&record).unwrap();
        }
        let mut second = TensorBoard::new(folder.path());
        second.record(&fixtures::resumed(7.9, 4)).unwrap();

        let files = files(folder.path());
        let names: Vec<_> = files.iter().map(|file| file.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(
            names,
            ["events.out.tfevents.0000000007.trainer", "events.out.tfevents.0000000008.trainer"]
        );
        let (one, two) = (payloads(&files[0]), payloads(&files[1]));
        assert!(one[0].ends_with(b"\x1a\x0dbrain.Event:2") && two[0].ends_with(b"\x1a\x0dbrain.Event:2"));
        assert_eq!(one.len(), 3);
        let has = |payload: &[u8], tag: &[u8]| payload.windows(tag.len()).any(|w| w == tag);
        assert!(has(&one[1], b"train/loss") && has(&one[2], b"valid/accuracy"));
        assert_eq!(two[1][9..], [0x10, 5, 0x3a, 2, 0x08, 1]);
    }
}
