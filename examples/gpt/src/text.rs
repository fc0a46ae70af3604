//! A text as windows of characters.

use std::{collections::BTreeSet, fs, path::Path, sync::Arc};

use anyhow::{Context, Result, ensure};
use burn::{
    data::{
        dataloader::batcher::Batcher,
        dataset::{Dataset, DatasetError},
    },
    tensor::{Device, Int, Tensor, TensorData},
};
use drumline_burn::data::DistributedDataLoader;

/// Delivers this rank's batches.
pub(crate) type Loader = Arc<DistributedDataLoader<Vec<i32>, Batch>>;

/// The characters of a file as numbers: their places in the alphabet of the file.
pub(crate) struct Text {
    /// Sorted.
    pub(crate) alphabet: Vec<char>,
    pub(crate) characters: Vec<i32>,
}

impl Text {
    /// Reads a file in UTF-8. Lines end with a line feed, whatever they end with in the file.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path)
            .with_context(|| format!("cannot read the text {}", path.display()))?;
        let text = text.replace("\r\n", "\n").replace('\r', "\n");
        let alphabet: Vec<char> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
        let number = |character| alphabet.partition_point(|other| *other < character) as i32;
        let characters = text.chars().map(number).collect();
        Ok(Self { alphabet, characters })
    }

    pub(crate) fn text(&self, numbers: &[i32]) -> String {
        numbers.iter().map(|&number| self.alphabet[number as usize]).collect()
    }

    /// For training, and the last twentieth for validation.
    pub(crate) fn windows(&self, places: usize) -> Result<(Windows, Windows)> {
        let (start, end) = self.characters.split_at(self.characters.len() * 19 / 20);
        let least = 20 * (places + 1);
        ensure!(
            end.len() > places,
            "the text has {} characters, but windows of {places} need {least}; use a longer text \
             or fewer --places",
            self.characters.len()
        );
        let windows = |part: &[i32]| Windows { characters: part.to_vec(), places };
        Ok((windows(start), windows(end)))
    }
}

/// Pieces of `places + 1` characters: each place is to tell the next.
pub(crate) struct Windows {
    characters: Vec<i32>,
    places: usize,
}

impl Dataset<Vec<i32>> for Windows {
    fn get(&self, index: usize) -> Result<Vec<i32>, DatasetError> {
        Ok(self.characters[index * self.places..][..=self.places].to_vec())
    }

    fn len(&self) -> usize {
        (self.characters.len() - 1) / self.places
    }
}

/// Windows that are trained on or evaluated together.
pub(crate) struct Batch {
    /// `[windows, places]`
    pub(crate) inputs: Tensor<2, Int>,
    /// The next character of each: `[windows * places]`
    pub(crate) targets: Tensor<1, Int>,
}

/// Makes batches.
pub(crate) struct Stack;

impl Batcher<Vec<i32>, Batch> for Stack {
    fn batch(&self, windows: Vec<Vec<i32>>, device: &Device) -> Batch {
        let (count, places) = (windows.len(), windows[0].len() - 1);
        let all = |range: std::ops::Range<usize>| -> Vec<i32> {
            windows.iter().flat_map(|window| &window[range.clone()]).copied().collect()
        };
        let (inputs, targets) = (all(0..places), all(1..places + 1));
        Batch {
            inputs: Tensor::from_data(TensorData::new(inputs, [count, places]), device),
            targets: Tensor::from_data(TensorData::new(targets, [count * places]), device),
        }
    }
}
