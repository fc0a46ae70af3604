//! The images: all of Fashion-MNIST when it is there, a small set of handwritten digits otherwise.

use std::{
    array, fs,
    io::{self, BufRead, BufReader, Read},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use flate2::read::GzDecoder;
use indicatif::HumanCount;

/// Pixels along one edge of an image.
pub const EDGE: usize = 28;
/// Bytes of one image.
pub const PIXELS: usize = EDGE * EDGE;
/// Classes of either data set.
pub const CLASSES: usize = 10;

/// Images for training and images for testing.
#[derive(Clone, Debug)]
pub struct DataSet {
    /// The name, as it appears in a sentence.
    pub name: &'static str,
    /// The directory that the images were read from; `None` for the images in this program.
    pub directory: Option<PathBuf>,
    /// The images for training.
    pub train: Split,
    /// The images for testing.
    pub test: Split,
}

/// Images and their labels.
#[derive(Clone, Debug, Default)]
pub struct Split {
    /// The pixels, `[len, EDGE, EDGE]` in row-major order; 0 is the background.
    images: Vec<u8>,
    /// The label of each image, below [`CLASSES`].
    labels: Vec<u8>,
}

impl DataSet {
    /// Reads the data set in `directory`. Without a directory, reads Fashion-MNIST from where `fetch-data.sh`
    /// puts it; if it is not there, takes the digits that are part of this program.
    pub fn load(directory: Option<&Path>) -> Result<Self> {
        if let Some(directory) = directory {
            return Self::read(directory);
        }
        match cache_directory() {
            Some(cache) if cache.is_dir() => Self::read(&cache),
            _ => Self::digits(DIGITS, None),
        }
    }

    /// Keeps only the first images: `train` for training and a sixth of that for testing.
    pub fn truncate(&mut self, train: usize) {
        self.train.truncate(train);
        self.test.truncate(train.div_ceil(6));
    }

    /// Describes the data set in one line.
    pub fn describe(&self) -> String {
        let from = match &self.directory {
            Some(directory) => format!("from {}", directory.display()),
            None => "built in; fetch-data.sh gets Fashion-MNIST".into(),
        };
        let [train, test] = [&self.train, &self.test].map(|split| HumanCount(split.count() as u64));
        format!("{}: {train} images to train, {test} to test ({from})", self.name)
    }

    fn read(directory: &Path) -> Result<Self> {
        let digits = directory.join(DIGITS_FILE);
        if digits.is_file() {
            let bytes = fs::read(&digits).with_context(|| cannot_read(&digits))?;
            return Self::digits(&bytes, Some(directory)).with_context(|| cannot_read(&digits));
        }
        ensure!(
            directory.join(TRAIN_FILES.0).exists(),
            "{} holds no data set: neither {} nor {DIGITS_FILE} is there; \
             examples/fashion-mnist/fetch-data.sh prints a directory that has one",
            directory.display(),
            TRAIN_FILES.0,
        );
        Ok(Self {
            name: "Fashion-MNIST",
            directory: Some(directory.to_owned()),
            train: Split::read_idx(directory, TRAIN_FILES, 60_000)?,
            test: Split::read_idx(directory, TEST_FILES, 10_000)?,
        })
    }

    fn digits(gzipped_csv: &[u8], directory: Option<&Path>) -> Result<Self> {
        let mut train = parse_digits(gzipped_csv)?;
        // The images are sorted by writer, so the test images are by people who wrote no training image.
        let test = train.split_off(DIGITS_TO_TRAIN);
        Ok(Self {
            name: "handwritten digits",
            directory: directory.map(Path::to_owned),
            train,
            test,
        })
    }
}

impl Split {
    /// The number of images.
    pub fn count(&self) -> usize {
        self.labels.len()
    }

    /// The pixels of these images, one image after another, and their labels.
    ///
    /// Pixels are shifted and scaled so that Fashion-MNIST has mean 0 and variance 1.
    pub fn batch(&self, indices: impl IntoIterator<Item = usize>) -> (Vec<f32>, Vec<i32>) {
        const MEAN: f32 = 0.2860;
        const DEVIATION: f32 = 0.3530;
        let (mut pixels, mut labels) = (Vec::new(), Vec::new());
        for index in indices {
            let image = &self.images[index * PIXELS..(index + 1) * PIXELS];
            pixels.extend(image.iter().map(|&p| (f32::from(p) / 255.0 - MEAN) / DEVIATION));
            labels.push(i32::from(self.labels[index]));
        }
        (pixels, labels)
    }

    fn truncate(&mut self, len: usize) {
        self.labels.truncate(len);
        self.images.truncate(len * PIXELS);
    }

    fn split_off(&mut self, at: usize) -> Self {
        let at = at.min(self.count());
        Self { images: self.images.split_off(at * PIXELS), labels: self.labels.split_off(at) }
    }

    fn read_idx(directory: &Path, (images, labels): (&str, &str), count: usize) -> Result<Self> {
        let (images, labels) = (directory.join(images), directory.join(labels));
        let split = Self {
            images: read_idx(&images, &[count, EDGE, EDGE])?,
            labels: read_idx(&labels, &[count])?,
        };
        if let Some(label) = split.labels.iter().find(|label| usize::from(**label) >= CLASSES) {
            bail!("{}: label {label} is not one of {CLASSES} classes", labels.display());
        }
        Ok(split)
    }
}

const TRAIN_FILES: (&str, &str) = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz");
const TEST_FILES: (&str, &str) = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz");
const DIGITS_FILE: &str = "digits.csv.gz";
const DIGITS: &[u8] = include_bytes!("../data/digits.csv.gz");
const DIGITS_TO_TRAIN: usize = 1_500;

/// The directory into which `fetch-data.sh` puts Fashion-MNIST.
fn cache_directory() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(cache.join("drumline/fashion-mnist"))
}

fn cannot_read(path: &Path) -> String {
    format!("cannot read {}", path.display())
}

/// Reads a gzipped IDX file of unsigned bytes that must have exactly this shape.
///
/// IDX: two zero bytes, the type (8: u8), the number of dimensions, each length as a big-endian
/// u32, the elements.
fn read_idx(path: &Path, shape: &[usize]) -> Result<Vec<u8>> {
    let file = fs::File::open(path).with_context(|| cannot_read(path))?;
    parse_idx(GzDecoder::new(BufReader::new(file)), shape).with_context(|| {
        format!(
            "{} is not the file it should be; delete {} and run \
             examples/fashion-mnist/fetch-data.sh again",
            path.display(),
            path.parent().unwrap_or(path).display(),
        )
    })
}

fn parse_idx(mut input: impl Read, shape: &[usize]) -> Result<Vec<u8>> {
    let mut expected_header = vec![0, 0, 8, shape.len() as u8];
    shape.iter().for_each(|length| expected_header.extend((*length as u32).to_be_bytes()));
    let elements: usize = shape.iter().product();

    let mut header = Vec::new();
    read_up_to(&mut input, expected_header.len(), &mut header)?;
    ensure!(
        header.len() == expected_header.len(),
        "expected a header of {} bytes, found {}",
        expected_header.len(),
        header.len(),
    );
    let [magic, expected_magic] = [&header, &expected_header].map(|h| hexadecimal(&h[..4]));
    ensure!(magic == expected_magic, "expected the magic number {expected_magic}, found {magic}");
    let lengths =
        header[4..].chunks_exact(4).map(|b| b.iter().fold(0, |n, &b| n << 8 | usize::from(b)));
    let lengths: Vec<usize> = lengths.collect();
    ensure!(lengths == shape, "expected the shape {shape:?}, found {lengths:?}");

    let mut bytes = Vec::with_capacity(elements);
    read_up_to(&mut input, elements + 1, &mut bytes)?;
    ensure!(
        bytes.len() == elements,
        "expected {elements} bytes of elements, found {}{}",
        if bytes.len() > elements { "more than " } else { "" },
        bytes.len().min(elements),
    );
    Ok(bytes)
}

/// Reads up to `length` bytes. An input that is cut off counts as one that ends.
fn read_up_to(input: &mut impl Read, length: usize, bytes: &mut Vec<u8>) -> Result<()> {
    match input.take(length as u64).read_to_end(bytes) {
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
            Err(error).with_context(|| format!("after {} bytes of it", bytes.len()))
        }
        _ => Ok(()),
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Edge of an image in the digits' file.
const DIGIT_EDGE: usize = 8;
/// The value of full ink in the digits' file.
const DIGIT_MAX: u8 = 16;

/// Reads lines of 64 numbers from 0 to 16 and a label, and enlarges the images.
fn parse_digits(gzipped_csv: &[u8]) -> Result<Split> {
    let mut split = Split::default();
    for (line, number) in BufReader::new(GzDecoder::new(gzipped_csv)).lines().zip(1..) {
        let line = line.with_context(|| format!("line {number}"))?;
        let numbers: Vec<u8> = line
            .split(',')
            .map(str::parse)
            .collect::<Result<_, _>>()
            .with_context(|| format!("line {number}"))?;
        let (pixels, label) = match numbers.split_last() {
            Some((label, pixels)) if pixels.len() == DIGIT_EDGE * DIGIT_EDGE => (pixels, *label),
            _ => bail!("line {number}: expected 65 numbers, found {}", numbers.len()),
        };
        ensure!(
            usize::from(label) < CLASSES && pixels.iter().all(|&pixel| pixel <= DIGIT_MAX),
            "line {number}: a number is out of range"
        );
        split.images.extend(enlarge(pixels));
        split.labels.push(label);
    }
    ensure!(split.count() > DIGITS_TO_TRAIN, "only {} images", split.count());
    Ok(split)
}

/// Enlarges an image from 8 x 8 to 28 x 28 by bilinear interpolation, and scales its values from 0..=16 to
/// 0..=255.
fn enlarge(pixels: &[u8]) -> Vec<u8> {
    // The neighbours on either side of a pixel's centre, and how far it is from the first.
    let places: [_; EDGE] = array::from_fn(|place| {
        let scale = DIGIT_EDGE as f32 / EDGE as f32;
        let centre = ((place as f32 + 0.5) * scale - 0.5).clamp(0.0, (DIGIT_EDGE - 1) as f32);
        let first = centre as usize;
        (first, (first + 1).min(DIGIT_EDGE - 1), centre.fract())
    });
    let mut wide = [[0.0; EDGE]; DIGIT_EDGE];
    for (wide, row) in wide.iter_mut().zip(pixels.chunks(DIGIT_EDGE)) {
        for (wide, (left, right, along)) in wide.iter_mut().zip(places) {
            *wide = f32::from(row[left]) * (1.0 - along) + f32::from(row[right]) * along;
        }
    }
    let mut large = Vec::with_capacity(PIXELS);
    for (top, bottom, down) in places {
        for (top, bottom) in wide[top].iter().zip(wide[bottom]) {
            let ink = top * (1.0 - down) + bottom * down;
            large.push((ink * 255.0 / f32::from(DIGIT_MAX)).round() as u8);
        }
    }
    large
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::{Compression, write::GzEncoder};

    use super::*;

    /// An IDX file of three images of 2 x 2 pixels.
    const IDX: &[u8] =
        &[0, 0, 8, 3, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 2, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];

    fn problem(bytes: &[u8]) -> String {
        format!("{:#}", parse_idx(bytes, &[3, 2, 2]).unwrap_err())
    }

    #[test]
    fn idx_files_must_be_exactly_as_expected() {
        let elements: Vec<u8> = (1..=12).collect();
        assert_eq!(parse_idx(IDX, &[3, 2, 2]).unwrap(), elements);

        assert_eq!(problem(&IDX[..9]), "expected a header of 16 bytes, found 9");
        assert_eq!(problem(&IDX[..27]), "expected 12 bytes of elements, found 11");
        assert_eq!(
            problem(&[IDX, &[0]].concat()),
            "expected 12 bytes of elements, found more than 12"
        );

        let mut labels = IDX.to_vec();
        labels[3] = 1;
        assert_eq!(problem(&labels), "expected the magic number 00000803, found 00000801");
        let mut fewer = IDX.to_vec();
        fewer[7] = 2;
        assert_eq!(problem(&fewer), "expected the shape [3, 2, 2], found [2, 2, 2]");
    }

    fn gzipped(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn a_file_that_was_cut_short_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(TRAIN_FILES.0);
        let mut bytes = vec![0, 0, 8, 3, 0, 0, 0xea, 0x60, 0, 0, 0, 28, 0, 0, 0, 28];
        bytes.extend((0..=255).cycle().take(300_000));
        let whole = gzipped(&bytes);
        let problem = || format!("{:#}", DataSet::load(Some(directory.path())).unwrap_err());

        for (content, expected) in [
            (&whole[..], "expected 47040000 bytes of elements, found 300000"),
            (&whole[..whole.len() / 2], "expected 47040000 bytes of elements, found "),
            (&whole[..0], "expected a header of 16 bytes, found 0"),
            (&b"<html>not found</html>"[..], "gzip"),
        ] {
            fs::write(&path, content).unwrap();
            let problem = problem();
            assert!(problem.contains(expected), "{problem}");
            assert!(problem.contains(&path.display().to_string()), "{problem}");
            assert!(problem.contains("fetch-data.sh again"), "{problem}");
        }

        fs::remove_file(&path).unwrap();
        assert!(problem().contains("holds no data set"), "{}", problem());
    }

    #[test]
    fn digits_are_built_in() {
        let data = DataSet::digits(DIGITS, None).unwrap();
        assert_eq!((data.train.count(), data.test.count()), (1_500, 297));
        for split in [&data.train, &data.test] {
            let mut counts = [0; CLASSES];
            split.labels.iter().for_each(|&label| counts[usize::from(label)] += 1);
            assert!(counts.iter().all(|&count| count > split.count() / 20), "{counts:?}");
        }
        assert_eq!(data.train.labels[..10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    }

    #[test]
    fn a_directory_with_digits_is_a_data_set() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(DIGITS_FILE);
        fs::write(&path, DIGITS).unwrap();
        let data = DataSet::load(Some(directory.path())).unwrap();
        assert_eq!(data.train.images, DataSet::digits(DIGITS, None).unwrap().train.images);

        let line = [&["17"; 64][..], &["3"]].concat().join(",");
        for (content, expected) in [
            (DIGITS[..DIGITS.len() / 2].to_vec(), "line "),
            (gzipped(b"1,2,3\n"), "line 1: expected 65 numbers, found 3"),
            (gzipped(line.as_bytes()), "line 1: a number is out of range"),
            (gzipped(b""), "only 0 images"),
        ] {
            fs::write(&path, content).unwrap();
            let problem = format!("{:#}", DataSet::load(Some(directory.path())).unwrap_err());
            assert!(problem.contains(expected), "{problem}");
            assert!(problem.contains(&path.display().to_string()), "{problem}");
        }
    }

    #[test]
    fn enlarging_keeps_shapes() {
        let flat: Vec<u8> = enlarge(&[16; 64]);
        assert_eq!(flat, [255; PIXELS]);

        // Ink in the left half of the paper.
        let half: Vec<u8> = (0..64).map(|place| if place % 8 < 4 { 16 } else { 0 }).collect();
        let large: Vec<u8> = enlarge(&half);
        for row in large.chunks_exact(EDGE) {
            assert_eq!((row[0], row[EDGE - 1]), (255, 0));
            assert!(row.is_sorted_by(|left, right| left >= right));
            let ink: u32 = row.iter().map(|&pixel| u32::from(pixel)).sum();
            assert!(ink.abs_diff(255 * EDGE as u32 / 2) < 10, "{ink}");
        }
    }

    #[test]
    fn batches_hold_what_was_asked_for() {
        let data = DataSet::digits(DIGITS, None).unwrap();
        let (pixels, labels) = data.train.batch([7, 3]);
        assert_eq!(labels, [7, 3]);
        let (third, _) = data.train.batch([3]);
        assert_eq!(pixels[PIXELS..], third);
        assert!((pixels[0] - -0.2860 / 0.3530).abs() < 1e-6, "the corner is paper");
    }
}
