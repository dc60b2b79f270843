//! Sets of pictures in files.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Failure, Sets};
use crate::data::fingerprint::Input;
use crate::data::idx::{self, Idx};
use crate::data::images::{self, Columns, Images, Names, Options, Packed, Set};
use crate::data::picture::mix::{Mixed, Mixing};
use crate::data::picture::{self, Erasing, Fit, Jitter, Normalise, Pipeline, ResizedCrop};
use crate::data::stream::{IN_ORDER, Streamed};
use crate::data::{Opening, Source, split};
use crate::job::{self, OneOr, Preset};

pub(super) fn idx(s: &job::Idx, readers: usize, opening: &Opening) -> Result<Sets, Failure> {
    let open = |images: &Path, labels: &Path, augment: picture::Augment| {
        Idx::open(&idx::Files {
            images: images.to_owned(),
            labels: labels.to_owned(),
            classes: (0..s.classes).map(|class| class.to_string()).collect(),
            normalise: Normalise { mean: floats(&s.mean), std: floats(&s.std) },
            augment,
            readers,
            max_bytes: opening.max_bytes,
        })
    };
    let train = open(&s.train_images, &s.train_labels, augment(&s.augment))?;
    let valid = open(&s.valid_images, &s.valid_labels, picture::Augment::default())?;
    Sets::of(train, valid).mixed(&s.augment, readers)
}

pub(super) fn idx_inputs(s: &job::Idx) -> Vec<Input> {
    vec![
        Input::file("data.train_images", &s.train_images),
        Input::file("data.train_labels", &s.train_labels),
        Input::file("data.valid_images", &s.valid_images),
        Input::file("data.valid_labels", &s.valid_labels),
    ]
}

pub(super) fn inputs(s: &job::Images) -> Result<Vec<Input>, Failure> {
    let columns = columns(s);
    let train = images::inputs(super::TRAIN, &s.files.train, &columns)?;
    Ok([train, images::inputs(super::VALID, &s.files.valid, &columns)?].concat())
}

fn columns(s: &job::Images) -> Columns {
    Columns { path: s.path_column.clone(), label: s.label_column.clone() }
}

pub(super) fn images(s: &job::Images, readers: usize, opening: &Opening) -> Result<Sets, Failure> {
    let [height, width] = match s.image_size.list()[..] {
        [height, width, ..] => [height, width],
        ref sides => [sides[0]; 2],
    };
    let fit = match s.fit {
        job::Fit::Crop => Fit::Crop { share: s.crop_share },
        job::Fit::Pad => Fit::Pad,
        job::Fit::Stretch => Fit::Stretch,
    };
    let measured = Pipeline::new([height, width, s.channels], fit, normalise(s))?;
    let trained = measured.clone().augmented(augment(&s.augment))?;
    let open = |files: &[PathBuf], classes: Option<&Names>| {
        let (channels, max_pixels, columns) = (s.channels, s.max_pixels, columns(s));
        let options = Options { channels, size: [height, width], max_pixels, columns, readers };
        Set::open(files, options, classes, opening).map(Arc::new)
    };
    let whole = open(&s.files.train, None)?;
    let valid = match &s.files.valid[..] {
        [] => None,
        files => Some(open(files, Some(whole.names()))?),
    };
    let set = |set: Arc<Set>, pipeline: &Pipeline, buffer: u64| -> Arc<dyn Source> {
        match set.packed {
            true => Arc::new(Streamed::new(Arc::new(Packed::new(set, pipeline.clone())), buffer)),
            false => Arc::new(Images::new(set, pipeline.clone())),
        }
    };
    let train = set(whole.clone(), &trained, opening.shuffle_buffer);
    let sets = match valid {
        Some(valid) => Sets { train, valid: set(valid, &measured, IN_ORDER) },
        None => {
            // The same parting of the same pictures, augmented for the one part and not for the other.
            let (train, _) = split::split(train, s.files.valid_share, opening.seed)?;
            let (_, valid) =
                split::split(set(whole, &measured, IN_ORDER), s.files.valid_share, opening.seed)?;
            Sets::of(train, valid)
        }
    };
    sets.mixed(&s.augment, readers)
}

impl Sets {
    /// The training set blended as the job wants it.
    pub(super) fn mixed(self, augment: &job::Augment, readers: usize) -> Result<Self, Failure> {
        let mixing = Mixing { mixup: augment.mixup, cutmix: augment.cutmix, chance: augment.mix_chance };
        if mixing.is_off() {
            return Ok(self);
        }
        Ok(Self { train: Arc::new(Mixed::new(self.train, mixing, readers)?), valid: self.valid })
    }
}

fn normalise(s: &job::Images) -> Normalise {
    // ImageNet's, and for grey the means over its channels.
    let (mean, std) = match (s.normalise, s.channels) {
        (Preset::Imagenet, 3) => (vec![0.485, 0.456, 0.406], vec![0.229, 0.224, 0.225]),
        (Preset::Imagenet, _) => (vec![0.449], vec![0.226]),
        (Preset::Half, _) => (vec![0.5], vec![0.5]),
        (Preset::None, _) => (vec![0.0], vec![1.0]),
    };
    Normalise { mean: s.mean.as_ref().map_or(mean, floats), std: s.std.as_ref().map_or(std, floats) }
}

fn floats(values: &OneOr<f64>) -> Vec<f32> {
    values.list().into_iter().map(|value| value as f32).collect()
}

/// What is drawn for a picture, from the job's keys.
pub(super) fn augment(a: &job::Augment) -> picture::Augment {
    let erasing = Erasing { chance: a.erasing, area: a.erasing_area, ratio: a.erasing_ratio };
    picture::Augment {
        resized_crop: a.random_resized_crop.map(|scale| ResizedCrop { scale, ratio: a.crop_ratio }),
        padding: a.crop_padding,
        horizontal_flip: a.horizontal_flip,
        vertical_flip: a.vertical_flip,
        jitter: Jitter {
            brightness: a.brightness,
            contrast: a.contrast,
            saturation: a.saturation,
            hue: a.hue,
        },
        erasing: (a.erasing > 0.0).then_some(erasing),
    }
}
