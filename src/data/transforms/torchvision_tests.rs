//! Augmentations of bytes against torchvision's and Pillow's own output, made by `scripts/augment-golden.py`.
//!
//! `TRAINER_AUGMENT_CASES` names a file of other cases.

use serde::Deserialize;

use super::affine::{AffineMap, AffineParameters};
use super::blur::gaussian_blur;
use super::randaugment::Operation;

#[derive(Deserialize)]
struct Original {
    shape: [usize; 3],
    image: String,
    cases: Vec<TransformCase>,
}

#[derive(Deserialize)]
struct TransformCase {
    expected: String,
    name: String,
    #[serde(default)]
    degrees: f64,
    #[serde(default)]
    translate: [f64; 2],
    #[serde(default)]
    scale: f64,
    #[serde(default)]
    shear: [f64; 2],
    #[serde(default)]
    kernel: usize,
    #[serde(default)]
    sigma: f64,
    #[serde(default)]
    magnitude: usize,
    #[serde(default)]
    negative: bool,
}

impl TransformCase {
    fn ours(&self, shape: [usize; 3], mut image: Vec<u8>) -> Vec<u8> {
        let mut spare = Vec::new();
        match self.name.as_str() {
            "Affine" => {
                let center = [shape[1], shape[0]].map(|side| side as f64 / 2.0);
                let Self { degrees, translate, scale, shear, .. } = *self;
                let map = AffineMap::new(&AffineParameters { center, degrees, translate, scale, shear });
                map.apply(shape, &mut image, &mut spare);
            }
            "Blur" => gaussian_blur(shape, &mut image, &mut Vec::new(), self.kernel, self.sigma),
            name => {
                let operation = Operation::ALL.into_iter().find(|operation| format!("{operation:?}") == name);
                let operation = operation.unwrap_or_else(|| panic!("no operation is called {name}"));
                operation.apply(self.magnitude, self.negative, shape, &mut image, &mut spare);
            }
        }
        image
    }

    /// Most that a value may differ by: sampling rounds where Pillow truncates, the blur sums in another order.
    fn tolerance(&self) -> u8 {
        match self.name.as_str() {
            "Affine" | "Blur" | "Rotate" | "ShearX" | "ShearY" => 1,
            _ => 0,
        }
    }
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

#[test]
fn every_value_is_that_of_torchvision() {
    let carried = include_str!("../../../tests/data/augment.json").to_owned();
    let text =
        std::env::var("TRAINER_AUGMENT_CASES").map_or(carried, |file| std::fs::read_to_string(file).unwrap());
    let originals: Vec<Original> = serde_json::from_str(&text).unwrap();
    let cases =
        || originals.iter().flat_map(|original| original.cases.iter().map(move |case| (original, case)));
    for operation in Operation::ALL.map(|operation| format!("{operation:?}")) {
        assert!(cases().any(|(_, case)| case.name == operation), "no case of {operation}");
    }
    let (mut values, mut off_by_one, mut on_the_border) = (0, 0, 0);
    for (original, case) in cases() {
        let (ours, expected) =
            (case.ours(original.shape, from_hex(&original.image)), from_hex(&case.expected));
        assert_eq!(ours.len(), expected.len());
        for (at, (a, b)) in ours.iter().zip(&expected).enumerate() {
            let place = format!("{} {} of {:?}, value {at}", case.name, case.magnitude, original.shape);
            // A point exactly on the border of the image is outside of it if the last bit of the matrix says so.
            if case.name == "Rotate" && a.abs_diff(*b) > 1 && (*a == 0 || *b == 0) {
                on_the_border += 1;
                continue;
            }
            assert!(a.abs_diff(*b) <= case.tolerance(), "{place}: {a}, and torchvision's is {b}");
            off_by_one += usize::from(a != b);
        }
        values += ours.len();
    }
    println!(
        "{} cases, {values} values, {off_by_one} off by one, {on_the_border} on the border",
        cases().count()
    );
    assert!(on_the_border * 100_000 <= values, "{on_the_border} of {values}");
}
